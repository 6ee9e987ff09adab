"""Which environment variables and working folder a task may set for the command that runs it.

The operator of a worker allows names and folders. No operator can allow the names in `REFUSED`: a
task that sets one of them decides what the operator's own command loads, runs or connects to.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase, translate
from pathlib import PurePath
from typing import NamedTuple

from tenuto.model.errors import Invalid

FIELD = "env"


class Refusal(NamedTuple):
    """Patterns (in upper case) of names that no task may set, and the reason."""

    reason: str
    patterns: str


REFUSED = (
    Refusal(
        "the dynamic loader and the C library load code and data from where it points",
        "LD_* DYLD_* _RLD* LIBPATH SHLIB_PATH GCONV_PATH GETCONF_DIR GLIBC_TUNABLES LOCPATH"
        " NLSPATH PATH_LOCALE MALLOC_* NIS_PATH NSS_* TZDIR OPENSSL_* ASAN_* LSAN_* MSAN_*"
        " TSAN_* UBSAN_* GTK_* GIO_* GDK_* GST_* QT_* QML* SDL_* VK_* CUDA_* ODBC* SASL_*"
        " PKCS11_* LIBMYSQL_* VALGRIND_* MAGICK_* HDF5_PLUGIN_* GDAL_DRIVER_* OMP_TOOL* HSA_TOOLS_*"
        " OMPI_* I_MPI_* PMIX_*",
    ),
    Refusal(
        "a shell runs or expands it",
        "BASH_* BASHOPTS SHELLOPTS ENV PS[0-9] PROMPT_COMMAND IFS CDPATH FPATH GLOBIGNORE"
        " NULLCMD READNULLCMD ZDOTDIR TMPPREFIX INPUTRC FCEDIT HISTFILE MAILPATH MODULE_PATH"
        " FISH_* XONSH* PSMODULEPATH CONFIG_SHELL FZF_* DIRENV_* SCREENRC PARALLEL*",
    ),
    Refusal(
        "it decides which programs, configuration and temporary files are found",
        "PATH SHELL HOME USER LOGNAME PWD OLDPWD XDG_* TMPDIR TMP TEMP TEMPDIR CONFIG_SITE"
        " ARGV0 DBUS_* SYSTEMD_* LISTEN_* NOTIFY_SOCKET SUDO_* MISE_* ASDF_* VOLTA_*",
    ),
    Refusal(
        "an interpreter or virtual machine loads or runs what it names",
        "PYTHON* IPYTHONDIR JUPYTER_* MPL* PYTEST_* COVERAGE_* DJANGO_* FLASK_* PERL* RUBY*"
        " GEM_* BUNDLE_* RBENV_* NODE_OPTIONS NODE_PATH NODE_REPL_* NODE_V8_COVERAGE"
        " NODE_COMPILE_CACHE NODE_REDIRECT_WARNINGS NODE_ICU_DATA TS_NODE_* ELECTRON_* DENO_*"
        " BUN_* JAVA_* _JAVA_OPTIONS IBM_JAVA_OPTIONS OPENJ9_* JDK_* JRE_HOME JAVACMD CLASSPATH"
        " MAVEN_* GRADLE_* ANT_* LEIN_* SBT_* LUA_* LUAJIT_* PHPRC PHP_* R_* JULIA_* ERL_*"
        " ELIXIR_* MIX_* HEX_* REBAR_* GUILE_* TCL* OCAML* CAML_* GHC_* AWKPATH AWKLIBPATH"
        " GOFLAGS GOENV GOROOT GOPATH GOTOOLCHAIN DOTNET_* CORECLR_* COR_* COMPLUS_* MONO_*"
        " VIRTUAL_ENV CONDA_* IRBRC SPEC_OPTS JRUBY_OPTS OCTAVE_* GUNICORN_CMD_ARGS",
    ),
    Refusal(
        "git, ssh and their like run what it names or read their configuration from it",
        "GIT_* GH_* GLAB_* GITLAB_HOST SSH_* SVN_* HGRCPATH HGEDITOR HGMERGE JJ_* P4* CVS_RSH"
        " CVSEDITOR RSYNC_* TAR_OPTIONS RIPGREP_CONFIG_PATH GNUPGHOME GPG_* DOCKER_* BUILDKIT_*"
        " BUILDX_* COMPOSE_* PODMAN_* CONTAINERS_* KUBECONFIG KUBE_* HELM_* TERRAFORM_* TF_*"
        " TERRAGRUNT_* TOFU_* PULUMI_* ANSIBLE_* PSQLRC PGSERVICEFILE PGSYSCONFDIR PGPASSFILE"
        " PGSSL* MYSQL_HOME NETRC WGETRC SYSTEM_WGETRC CURL_HOME CURL_* BZR_* LEFTHOOK_* RCLONE_*"
        " RESTIC_* BORG_* PACKER_* VAGRANT_* ZIP ZIPOPT MAILRC",
    ),
    Refusal(
        "a program runs it as its editor, pager or browser, or reads a terminal's codes from it",
        "EDITOR *_EDITOR VISUAL *PAGER LESS LESSOPEN LESSCLOSE LESSEDIT LESSKEY* MORE MANOPT"
        " MANROFFOPT BROWSER TERMINFO* TERMCAP TERMPATH VIMINIT EXINIT VIM VIMRUNTIME MYVIMRC"
        " NVIM_* EMACS* BAT_* PUPPETEER_* PLAYWRIGHT_* CYPRESS_*",
    ),
    Refusal(
        "a compiler, build tool or package manager runs it or fetches from where it points",
        "MAKEFLAGS GNUMAKEFLAGS MAKEFILES MAKE MFLAGS CC CXX CPP AS AR LD CFLAGS CXXFLAGS"
        " CPPFLAGS LDFLAGS CMAKE_* PKG_CONFIG* COMPILER_PATH GCC_* COLLECT_* CCACHE_* SCCACHE_*"
        " LIBRARY_PATH CPATH *_INCLUDE_PATH CGO_* NPM_* PNPM_* YARN_* COREPACK_* NVM_* PIP_*"
        " PIPX_* PIPENV_* PYENV_* TOX_* VIRTUALENV_* WORKON_HOME UV_* POETRY_* PDM_* HATCH_*"
        " CARGO_* RUSTC* RUSTUP_* RUSTFLAGS RUSTDOC* GOAUTH GOCACHEPROG GOWORK GOVCS GOMODCACHE"
        " GOTMPDIR GOPROXY GONOPROXY GOSUMDB GONOSUMDB GOPRIVATE GOINSECURE NUGET_* MSBUILD*"
        " COMPOSER_* HOMEBREW_* APT_* NIX_* GOCACHE SCONSFLAGS BAZEL* USE_BAZEL_* ESBUILD_*",
    ),
    Refusal(
        "it redirects connections or changes which certificates they trust",
        "*_PROXY PROXY_* SOCKS* TSOCKS_* PROXYCHAINS_* SSL_* *_CA_BUNDLE *_CA_CERTS *_CA_FILE"
        " NODE_TLS_* SSLKEYLOGFILE GRPC_DEFAULT_SSL_* HOSTALIASES LOCALDOMAIN RES_OPTIONS"
        " RESOLV_* KRB5* VAULT_ADDR VAULT_AGENT_ADDR CONSUL_HTTP_ADDR",
    ),
    Refusal(
        "an agent's program sends its key and prompts to where it points, or runs what it names",
        "*_BASE_URL *_API_BASE *_API_URL *_API_HOST *_BASE_URI *_SERVER_URL *_ENDPOINT"
        " *_ENDPOINTS *_ENDPOINT_URL *_ENDPOINT_URL_* *_CUSTOM_HEADERS *_UNIX_SOCKET"
        " ANTHROPIC_HOST OPENAI_HOST OLLAMA_HOST DATABRICKS_HOST AZURE_AUTHORITY_HOST CLAUDE_*"
        " CODEX_* GEMINI_CLI_* GEMINI_SANDBOX* GEMINI_SYSTEM_MD GEMINI_WRITE_* GEMINI_TELEMETRY_*"
        " SANDBOX_* OPENCODE_* QWEN_CODE_* GOOSE_* COPILOT_* CURSOR_* AMP_* AIDER_*"
        " AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE AWS_DATA_PATH AWS_PROFILE"
        " AWS_DEFAULT_PROFILE AWS_CONTAINER_* BOTO_CONFIG AZURE_CONFIG_DIR"
        " GOOGLE_APPLICATION_CREDENTIALS GOOGLE_CLOUD_LOCATION CLOUD_ML_REGION VERTEX_REGION_*"
        " CLOUDSDK_* OTEL_* LANGFUSE_HOST ANTHROPIC_CONFIG_DIR ANTHROPIC_PROFILE"
        " ANTHROPIC_FOUNDRY_RESOURCE AZURE_RESOURCE_NAME",
    ),
    Refusal("Tenuto itself passes the task to the command with it", "TENUTO_*"),
)


ALLOWABLE = "*_TOKEN GIT_AUTHOR_* GIT_COMMITTER_* TF_VAR_* MIX_ENV"
"""Names that an operator may allow although they match `REFUSED`.

They carry a credential, a person's name or a value, and make nothing run.
"""


class Allowed(NamedTuple):
    """Names and folders that a worker's operator allows. Folders are absolute, links resolved."""

    names: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def _compile_patterns(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns.split())))


_REFUSED = [(_compile_patterns(refusal.patterns), refusal.reason) for refusal in REFUSED]
_ALLOWABLE = _compile_patterns(ALLOWABLE)


def refusal_reason(name: str) -> str | None:
    """Returns why no task may set the variable, or `None` if a worker's operator may allow it."""
    upper = name.upper()
    if _ALLOWABLE.match(upper):
        return None
    return next((reason for pattern, reason in _REFUSED if pattern.match(upper)), None)


def check_variable_names(names: Iterable[str]) -> None:
    """Raises `Invalid` for a name that no worker's operator can allow."""
    for name in names:
        if (reason := refusal_reason(name)) is not None:
            raise Invalid(f"tasks may never set {name}: {reason}", field=FIELD)


def check_allowed(
    env: Mapping[str, str], cwd: str | None, folder: str | None, allowed: Allowed
) -> None:
    """Raises `Invalid` unless a task may set these variables and work in that folder.

    `folder` is the task's `cwd`, made absolute and with links resolved; `None` is the worker's own
    folder. The error shows `cwd` only: a task must not learn where links lead.
    """
    check_variable_names(env)
    for name in env:
        if not any(fnmatchcase(name, pattern) for pattern in allowed.names):
            raise Invalid(
                f"this worker does not let tasks set {name}; start it with"
                f" --allow-env {shlex.quote(name)}",
                field=FIELD,
            )
    if folder is not None and not any(
        _is_within(folder, allowed_folder) for allowed_folder in allowed.folders
    ):
        argument = shlex.quote(cwd or folder) if PurePath(cwd or folder).is_absolute() else "FOLDER"
        raise Invalid(
            f"this worker does not let tasks work in {cwd};"
            f" start it with --allow-folder {argument}",
            field="cwd",
        )


def _is_within(folder: str, allowed_folder: str) -> bool:
    return PurePath(folder).is_relative_to(allowed_folder)
