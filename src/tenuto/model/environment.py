"""What a task may set for the command it runs in: variables by name, and the working folder.

The owner of a worker allows names and folders. `REFUSED` holds the names that nobody can allow: a
task that sets one decides what the owner's own command loads, runs or talks to.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase, translate
from pathlib import PurePath
from typing import NamedTuple

from tenuto.model.errors import Invalid

FIELD = "env"


class Refusal(NamedTuple):
    """Names that no task sets, as patterns in upper case, and what they do."""

    reason: str
    patterns: str


REFUSED = (
    Refusal(
        "the dynamic loader and the C library load code and data from where it says",
        "LD_* DYLD_* _RLD* LIBPATH SHLIB_PATH GCONV_PATH GETCONF_DIR GLIBC_TUNABLES LOCPATH"
        " NLSPATH PATH_LOCALE MALLOC_* NIS_PATH NSS_* TZDIR OPENSSL_* ASAN_* LSAN_* MSAN_*"
        " TSAN_* UBSAN_*",
    ),
    Refusal(
        "a shell runs or expands it",
        "BASH_* BASHOPTS SHELLOPTS ENV PS[0-9] PROMPT_COMMAND IFS CDPATH FPATH GLOBIGNORE"
        " NULLCMD READNULLCMD ZDOTDIR TMPPREFIX INPUTRC FCEDIT HISTFILE MAILPATH MODULE_PATH",
    ),
    Refusal(
        "it decides which programs, configuration and temporary files are found",
        "PATH SHELL HOME USER LOGNAME PWD OLDPWD XDG_* TMPDIR TMP TEMP TEMPDIR CONFIG_SITE"
        " ARGV0 DBUS_* SYSTEMD_* LISTEN_* NOTIFY_SOCKET SUDO_*",
    ),
    Refusal(
        "an interpreter or virtual machine loads or runs what it names",
        "PYTHON* PERL* RUBY* GEM_* BUNDLE_* RBENV_* NODE_OPTIONS NODE_PATH NODE_REPL_*"
        " NODE_V8_COVERAGE NODE_COMPILE_CACHE NODE_REDIRECT_WARNINGS DENO_* BUN_* JAVA_*"
        " _JAVA_OPTIONS JDK_* JAVACMD CLASSPATH MAVEN_* GRADLE_* SBT_* LUA_* LUAJIT_* PHPRC"
        " PHP_* R_* JULIA_* ERL_* ELIXIR_* GUILE_* TCL* AWKPATH AWKLIBPATH GOFLAGS GOENV"
        " GOROOT GOPATH GOTOOLCHAIN DOTNET_* CORECLR_* COMPLUS_* VIRTUAL_ENV CONDA_*",
    ),
    Refusal(
        "git, ssh and their like run what it names or read their configuration from it",
        "GIT_* SSH_* SVN_* HGRCPATH HGEDITOR HGMERGE CVS_RSH CVSEDITOR RSYNC_* TAR_OPTIONS"
        " GNUPGHOME GPG_* DOCKER_* PODMAN_* CONTAINERS_* KUBECONFIG KUBE_* TERRAFORM_* TF_*"
        " ANSIBLE_* PGSERVICEFILE PGSYSCONFDIR MYSQL_HOME NETRC WGETRC SYSTEM_WGETRC CURL_HOME"
        " CURL_*",
    ),
    Refusal(
        "a program runs it as its editor, pager or browser, or reads a terminal's codes from it",
        "EDITOR *_EDITOR VISUAL *PAGER LESS LESSOPEN LESSCLOSE LESSEDIT LESSKEY* MORE MANOPT"
        " BROWSER TERMINFO* TERMCAP TERMPATH VIMINIT EXINIT VIM VIMRUNTIME MYVIMRC NVIM_*"
        " EMACS*",
    ),
    Refusal(
        "a compiler, build tool or package manager runs it or fetches from where it says",
        "MAKEFLAGS GNUMAKEFLAGS MAKEFILES MAKE MFLAGS CC CXX CPP AS AR LD CFLAGS CXXFLAGS"
        " CPPFLAGS LDFLAGS CMAKE_* PKG_CONFIG* COMPILER_PATH GCC_* COLLECT_* LIBRARY_PATH"
        " CPATH *_INCLUDE_PATH NPM_* PNPM_* YARN_* COREPACK_* NVM_* PIP_* PIPX_* UV_* POETRY_*"
        " PDM_* HATCH_* CARGO_* RUSTC* RUSTUP_* RUSTFLAGS RUSTDOC* GOPROXY GONOPROXY GOSUMDB"
        " GONOSUMDB GOPRIVATE GOINSECURE COMPOSER_* HOMEBREW_* APT_* NIX_*",
    ),
    Refusal(
        "it leads connections elsewhere, or changes whom they trust",
        "*_PROXY PROXY_* SSL_* *_CA_BUNDLE *_CA_CERTS *_CA_FILE NODE_TLS_* SSLKEYLOGFILE"
        " GRPC_DEFAULT_SSL_* HOSTALIASES LOCALDOMAIN RES_OPTIONS RESOLV_* KRB5*",
    ),
    Refusal(
        "an agent's program sends its key and its prompts to where it says, or runs what it names",
        "*_BASE_URL *_API_BASE *_API_URL *_API_HOST *_BASE_URI *_ENDPOINT *_ENDPOINTS"
        " *_ENDPOINT_URL *_ENDPOINT_URL_* *_CUSTOM_HEADERS OLLAMA_HOST CLAUDE_* CODEX_*"
        " GEMINI_CLI_* AIDER_* AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE AWS_DATA_PATH"
        " AWS_PROFILE CLOUDSDK_* OTEL_*",
    ),
    Refusal("it is how Tenuto tells a command of its task", "TENUTO_*"),
)


class Allowed(NamedTuple):
    """What the owner of a worker lets tasks set. Folders are absolute, with links resolved."""

    names: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def _compiled() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile("|".join(map(translate, each.patterns.split()))), each.reason)
        for each in REFUSED
    ]


_REFUSED = _compiled()


def always_refused(name: str) -> str | None:
    """Returns why no task may set the variable, or `None` if a worker's owner may allow it."""
    upper = name.upper()
    return next((reason for pattern, reason in _REFUSED if pattern.match(upper)), None)


def check_names(names: Iterable[str]) -> None:
    """Raise `Invalid` for a name that no worker's owner can allow."""
    for name in names:
        if (reason := always_refused(name)) is not None:
            raise Invalid(f"tasks may never set {name}: {reason}", field=FIELD)


def decide(env: Mapping[str, str], cwd: str | None, folder: str | None, allowed: Allowed) -> None:
    """Raise `Invalid` unless a task may set these variables and work in that folder.

    `folder` is what the task's `cwd` leads to, absolute and with links resolved; `None` is the
    folder of the worker. The error has `cwd` alone: where links lead is not the task's to know.
    """
    check_names(env)
    for name in env:
        if not any(fnmatchcase(name, pattern) for pattern in allowed.names):
            raise Invalid(
                f"this worker does not let tasks set {name}; start it with --allow-env {name}",
                field=FIELD,
            )
    if folder is not None and not any(_is_within(folder, root) for root in allowed.folders):
        raise Invalid(
            f"this worker does not let tasks work in {cwd}; start it with --allow-folder {cwd}",
            field="cwd",
        )


def _is_within(folder: str, root: str) -> bool:
    return PurePath(folder).is_relative_to(root)
