"""Variables that a task can set: the table of refused names, and the owner's patterns."""

import re

import pytest

from tenuto.model.errors import Invalid
from tenuto.model.tasks.environment import REFUSED, Allowed, check_allowed, refusal_reason
from tenuto.model.tasks.submission import NewTask, check

EVIL = """
LD_PRELOAD LD_AUDIT DYLD_INSERT_LIBRARIES GCONV_PATH GLIBC_TUNABLES BASH_ENV ENV BASH_FUNC_ls%%
SHELLOPTS BASHOPTS PS4 PROMPT_COMMAND IFS PATH HOME SHELL PYTHONPATH PYTHONSTARTUP PYTHONHOME
PYTHONINSPECT PERL5OPT PERL5LIB RUBYOPT RUBYLIB NODE_OPTIONS NODE_PATH JAVA_TOOL_OPTIONS
_JAVA_OPTIONS JDK_JAVA_OPTIONS CLASSPATH LUA_INIT LUA_INIT_5_4 PHPRC R_PROFILE GIT_SSH_COMMAND
GIT_CONFIG_COUNT GIT_EXTERNAL_DIFF SSH_ASKPASS EDITOR VISUAL PAGER GIT_PAGER LESSOPEN LESSCLOSE
MANPAGER BROWSER HTTP_PROXY https_proxy ALL_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
CURL_CA_BUNDLE CURL_HOME NODE_EXTRA_CA_CERTS npm_config_registry PIP_INDEX_URL UV_INDEX_URL
CARGO_HOME RUSTC_WRAPPER MAKEFLAGS TERMINFO XDG_CONFIG_HOME TMPDIR TENUTO_ATTEMPT
ANTHROPIC_BASE_URL OPENAI_API_BASE AZURE_OPENAI_ENDPOINT AWS_ENDPOINT_URL_S3 CLAUDE_CONFIG_DIR
Ld_Preload bash_env PYTEST_ADDOPTS GOAUTH GOCACHEPROG RIPGREP_CONFIG_PATH PSQLRC GH_HOST
OPENCODE_CONFIG_CONTENT GEMINI_SANDBOX GOOSE_PROVIDER__HOST COPILOT_HOME AWS_DEFAULT_PROFILE
IBM_JAVA_OPTIONS fish_function_path CCACHE_PREFIX MIX_HOME HELM_PLUGINS QT_PLUGIN_PATH
GTK_MODULES PGPASSFILE SOCKS_SERVER VAULT_ADDR GOOGLE_APPLICATION_CREDENTIALS ZIPOPT VALGRIND_LIB
GOOGLE_CLOUD_LOCATION CLOUD_ML_REGION ANTHROPIC_PROFILE PARALLEL PLAYWRIGHT_BROWSERS_PATH
GH_TOKEN_FILE GIT_AUTHOR TF_CLI_CONFIG_FILE
""".split()
PLAIN = """
DEPTH BUILD_ID CI WHO A NODE_ENV DATABASE_URL API_KEY ANTHROPIC_API_KEY AWS_ACCESS_KEY_ID PGHOST
PASSWORD LANG TZ RELEASE OUT TOKEN LESSON PATHS MYPATH ENVIRONMENT DEBUG GEMINI_API_KEY PORT
GH_TOKEN NPM_TOKEN CARGO_REGISTRY_TOKEN GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL TF_VAR_region MIX_ENV
""".split()


@pytest.mark.parametrize("name", EVIL)
def test_variable_that_makes_programs_run_code_cannot_be_allowed(name: str) -> None:
    assert refusal_reason(name) is not None
    with pytest.raises(Invalid, match=rf"^tasks may never set {re.escape(name)}: ") as refused:
        check_allowed({name: "x"}, None, None, Allowed(("*", name)))
    assert refused.value.details == {"field": "env"}
    with pytest.raises(Invalid, match=rf"^tasks may never set {re.escape(name)}"):
        check(NewTask(title="t", env={name: "x"}))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_variable_needs_the_owners_permission(name: str) -> None:
    check(NewTask(title="t", env={name: "x"}))
    with pytest.raises(Invalid, match=f"set {name}; start it with --allow-env {name}$"):
        check_allowed({name: "x"}, None, None, Allowed())
    check_allowed({name: "x"}, None, None, Allowed((name,)))


def test_patterns_match_case_sensitively() -> None:
    allowed = Allowed(("BUILD_*", "X?"))
    check_allowed({"BUILD_ID": "1", "BUILD_": "2", "X1": "3"}, None, None, allowed)
    for name in ("build_id", "BUILD", "XBUILD_ID", "X12"):
        with pytest.raises(Invalid, match="does not let tasks set"):
            check_allowed({name: "1"}, None, None, allowed)


def test_folder_must_be_a_root_or_below() -> None:
    allowed = Allowed((), ("/srv/work", "/data"))
    for folder in (None, "/srv/work", "/srv/work/a/b", "/data/x"):
        check_allowed({}, "said", folder, allowed)
    for folder in ("/srv", "/srv/workshop", "/", "/etc"):
        with pytest.raises(Invalid, match=r"work in said; start it with --allow-folder FOLDER$"):
            check_allowed({}, "said", folder, allowed)
    check_allowed({}, "said", "/etc", Allowed((), ("/",)))
    with pytest.raises(Invalid):
        check_allowed({}, "said", "/etc", Allowed())


def test_table_of_refused_variables_is_upper_case_without_duplicates() -> None:
    names = [name for item in REFUSED for name in item.patterns.split()]
    assert [name for name in names if name != name.upper()] == []
    assert sorted(set(names)) == sorted(names)
    assert all(item.reason for item in REFUSED)


def test_option_quoted_in_a_refusal_is_one_shell_word() -> None:
    with pytest.raises(Invalid, match=r"--allow-env 'A; id'$"):
        check_allowed({"A; id": "x"}, None, None, Allowed())
    with pytest.raises(Invalid, match=r"--allow-folder '/tmp/\$\(id\)'$"):
        check_allowed({}, "/tmp/$(id)", "/tmp/$(id)", Allowed(("*",)))
