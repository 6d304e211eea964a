"""Taking secrets and personal names out of what is stored or printed: text, command lines, remotes, variables.

A value is a secret when its own shape says so (a known key format), or when the word before it names a secret *and* the
value could be one: ``--max-tokens 512``, ``pad_token_id`` and a git hash look like one only at a glance. In source code
only literals and comments can be secrets, so a variable may be called ``token``, ``key`` or ``secret``.
An e-mail address has a domain whose end exists: ``q@k.T`` is a product. ``git@`` is nobody's.
Home folders become ``~``. Redacting twice gives the same as once.
"""

from __future__ import annotations

import fnmatch
import functools
import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

REDACTED = "***"

ALLOWED_VARIABLES = (
    *("ACCELERATE_*", "CUBLAS_*", "CUDA*", "CUDNN_*", "NCCL*", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES"),
    *("HIP_*", "HSA_*", "MIOPEN_*", "ROCR_*", "XLA_FLAGS"),
    *("GOMP_*", "KMP_*", "MKL_*", "OMP_*", "OPENBLAS_*"),
    *("PYTORCH_*", "TORCH*", "TRITON_*", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
)

_KNOWN_SECRET = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}                                  # Hugging Face
    | \b(?:sk|rk|pk)-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}  # OpenAI, Anthropic and alike
    | \b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}             # Stripe
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bgl(?:pat|dt|rt|cbt)-[A-Za-z0-9_.-]{16,}              # GitLab
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                          # AWS
    | \bAIza[0-9A-Za-z_-]{30,}                               # Google
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                       # Slack
    | \b(?:npm|pypi|dop_v1|nvapi|r8|gsk)[_-][A-Za-z0-9_-]{20,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*  # JSON web token
    | \bya29\.[A-Za-z0-9_-]{20,} | \bGOCSPX-[A-Za-z0-9_-]{20,}  # Google's OAuth
    | \bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}             # SendGrid
    | (?<![0-9])[0-9]{8,10}:AA[A-Za-z0-9_-]{30,}                # Telegram
    | (?<=hooks\.slack\.com/services/)[A-Za-z0-9/]+            # webhooks, with which anybody can write
    | (?<=discord\.com/api/webhooks/)[A-Za-z0-9_/-]+
    """,
    re.VERBOSE,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_BEARER = re.compile(r"\b(Bearer|Basic|(?i:Authorization[\"']?\s*[:=]\s*[\"']?token))\s+([A-Za-z0-9._~+/=-]{16,})")
_LOGIN = re.compile(r"""(\blogin\(\s*["'])((?=[^0-9"']*[0-9])(?=[^A-Za-z"']*[A-Za-z])[A-Za-z0-9_-]{20,})""")
_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"]*:?[^\s/@'\"]*@")

# Domains that mail ends in, and that of private networks. Code reads attributes called `net` or `to` as well, so there
# what follows counts too; the sure ones are no attributes of anything.
_SURE_ENDS = frozenset(("com", "edu", "gov", "mil", "org"))
_OTHER_ENDS = """
ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bv bw by bz ca cc cd
cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge gf
gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh ki km
kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz
na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb sc sd se sg
sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk us uy uz va vc
ve vg vi vn vu wf ws ye yt za zm zw
academy agency app asia berlin bio biz blog capital care chat cloud club codes community company consulting corp dev
digital edu education email energy engineering example foundation fund global group health inc info institute int
internal international intranet invalid jobs lan law life live llc local localdomain ltd mail media museum name net
network ngo one online page paris partners press pro science services shop site social software solutions space store
studio support swiss systems team tech technology test today tools university ventures website wien work works world
xyz zone
"""
_MAIL_ENDS = _SURE_ENDS.union(_OTHER_ENDS.split())
_MAIL = re.compile(
    r"""
      (?<!\w) (?P<who>\w[\w.+%-]{0,63}) (?:@|%40)
      (?P<domain>(?:[^\W_]|-)+ (?:\.(?:[^\W_]|-)+)*) \. (?P<end>xn--[a-z0-9-]+|[A-Za-z][a-z]+|[A-Z]{2,}) (?![A-Za-z0-9])
      (?P<as_code>[\[(=_] | \.\w)?
    """,
    re.VERBOSE,
)
_NOBODYS_MAIL = frozenset(("git", "hg", "svn"))

_KEY_OWNERS = r"api|access|account|auth|private|secret|signing|encryption|license|wandb"
_PASS_OWNERS = r"admin|db|ftp|http|login|mongo|mysql|pg|postgres|proxy|redis|smtp|ssh|sudo|user"
_STRONG_WORDS = (
    rf"password|passwd|passphrase|secret|credentials?|(?:{_KEY_OWNERS})[_-]?key|(?:{_PASS_OWNERS})[_-]?pass(?![A-Za-z])"
    r"|(?<![A-Za-z])pwd"
)
_WEAK_WORDS = r"token|auth|authorization|signature|sig|pat"
_BARE_WORD = r"key"  # of a dictionary as often as of a service
_KEY = (
    rf"(?<![A-Za-z0-9])(?P<key>[A-Za-z0-9_.\-]{{0,80}}?"  # without a limit the search would take time by the square
    rf"(?:(?P<strong>{_STRONG_WORDS})|(?<![A-Za-z])(?:{_WEAK_WORDS}|(?P<bare>{_BARE_WORD}))))"
)
_ASSIGNED = re.compile(
    rf"{_KEY}(?P<between>[\"']?\]?\s*(?:=|:)\s*|[\"']\s*,\s*)(?P<quote>[\"']?)(?P<value>[^\s\"',;&)}}\]]+)",
    re.IGNORECASE,
)
_FLAGGED = re.compile(rf"(?<!\S)--?{_KEY}(?P<between>\s+)(?P<quote>[\"']?)(?P<value>[^\s\"'-][^\s\"']*)", re.IGNORECASE)
_FLAG = re.compile(rf"--?{_KEY}", re.IGNORECASE)
_NOT_SECRET = re.compile(
    r"(?i)none|null|true|false|yes|no|auto|\*+|[-+]?[0-9.]{1,5}(?:e[-+]?[0-9]+)?|<[^>]*>|\[[^\]]*\]?|\$.*"
    r"|(?:self|torch|np|os|F|nn)\..*|[A-Za-z_][\w.]*[(\[].*"  # an expression: `tensor(nan`, `q[:`
)
_TOKEN_SHAPE = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_\-+/=.~%]{12,}")
_KEY_SHAPE = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9]{20,}")
_LITERAL = re.compile(
    r"""(?P<ticks>\"{3}|'{3}).*?(?:(?P=ticks)|\Z) | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | \#[^\n]*""",
    re.DOTALL | re.VERBOSE,
)
_QUOTED_CODE = re.compile(r"(?m)^(?P<place>\s*File \"[^\"\n]*\", line [0-9]+.*\n)(?P<code>[ \t]+\S.*)$")

_LIBRARIES = re.compile(r"(?<![\w.~-])(?:[A-Za-z]:)?[/\\][^\s\"':;,)>\]]*[/\\](?:site|dist)-packages[/\\]")
_ABSOLUTE = re.compile(r"(?<![\w.~:/*%<)\]-])/(?:[\w.+@-]+/)+(?P<last>[\w.+@-]+)")
_PUBLIC_FOLDERS = ("/usr/", "/lib/", "/lib64/", "/bin/", "/opt/", "/proc/", "/sys/", "/etc/", "/dev/")
_COMPILER_CACHE = re.compile(r"(?<=[/\\]torchinductor)_[\w.@-]+")  # torch names it after the user
_FOLDERS = re.compile(r"(?<![\w~.:/-])(?:/[\w.+@-]+)+")
_NOBODY = frozenset(("admin", "jovyan", "nobody", "root", "runner", "ubuntu", "user", "vscode"))
_HOMES = re.compile(r"(?<![\w.~-])(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)(?!\.)[^/\\\s\"':;,)>\]]+")


def redact_text(text: str) -> str:
    """Free text without credentials, home folders and this machine's name; lines of code in a traceback are source."""
    pieces, end = [], 0
    for match in _QUOTED_CODE.finditer(text):
        pieces += [_redact_words(text[end : match.start("code")]), redact_source(match["code"])]
        end = match.end("code")
    return "".join((*pieces, _redact_words(text[end:])))


def redact_source(code: str) -> str:
    """Python source without credentials: names stay whatever they are, literals and comments are redacted."""
    code = _ASSIGNED.sub(lambda match: _hide_value(match) if match["quote"] else match[0], _hide_known(code))
    return _hide_places(_LITERAL.sub(lambda match: _redact_words(match[0]), code))


def shorten_paths(text: str) -> str:
    """Text whose absolute paths are cut to their last part, those of the system's own folders left as they are."""

    def short(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith(_PUBLIC_FOLDERS) else match["last"]

    return _ABSOLUTE.sub(short, text)


def _redact_words(text: str) -> str:
    text = _ASSIGNED.sub(_hide_value, _MAIL.sub(_hide_mail, _hide_known(text)))
    return _hide_places(_FLAGGED.sub(_hide_value, text))


def _hide_known(text: str) -> str:
    """Hide what its own shape gives away."""
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\g<1>{REDACTED}@", text)
    text = _KNOWN_SECRET.sub(REDACTED, text)
    text = _LOGIN.sub(rf"\g<1>{REDACTED}", text)
    return _BEARER.sub(rf"\g<1> {REDACTED}", text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without credentials: ``--token VALUE``, ``--token=VALUE`` and ``hub.token=VALUE`` alike."""
    clean: list[str] = []
    flag: re.Match[str] | None = None
    for argument in argv:
        if flag is not None and not argument.startswith("-") and _could_be_secret(argument, flag):
            clean.append(REDACTED)
        else:
            clean.append(redact_text(argument))
        flag = _FLAG.fullmatch(argument)
    return clean


def redact_remote(url: str) -> str:
    """A remote's address without user name, password and query; a local folder becomes its last part."""
    parts = urlsplit(url)
    if not parts.scheme:
        login, _, place = url.rpartition("@") if ":" in url else ("", "", Path(url).name)
        who = f"{login if login in _NOBODYS_MAIL else REDACTED}@" if login else ""
        return who + redact_text(place)
    if parts.scheme == "file":
        return redact_text(Path(parts.path).name)
    host = parts.netloc.rpartition("@")[2]
    return redact_text(urlunsplit((parts.scheme, host, parts.path, "", "")))


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may matter to a run and hold nothing private, sorted by name."""
    return {
        name: redact_text(value)
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, allowed) for allowed in ALLOWED_VARIABLES) and not _FLAG.fullmatch(f"--{name}")
    }


def _hide_mail(match: re.Match[str]) -> str:
    """An e-mail address hidden; a login that is nobody's, an expression or a version as it is."""
    who, domain, end = match["who"], match["domain"], match["end"].lower()
    exists = end in _MAIL_ENDS or end.startswith("xn--")
    is_own = "self" in (who.partition(".")[0], domain.partition(".")[0])
    is_product = end not in _SURE_ENDS and (match["as_code"] or is_own or len(who) == len(domain) == 1)
    is_version = re.fullmatch(r"\d+(?:\.\d+)+", domain)
    if not exists or is_product or is_version or who in _NOBODYS_MAIL:
        return match[0]
    return REDACTED + (match["as_code"] or "")


def _hide_value(match: re.Match[str]) -> str:
    if not _could_be_secret(match["value"], match):
        return match[0]
    return match[0][: match.start("value") - match.start()] + REDACTED


def _could_be_secret(value: str, name: re.Match[str]) -> bool:
    """True if ``value`` may be what its name promises; after a weak word such as ``token`` it must look like a key."""
    if _NOT_SECRET.fullmatch(value) or value.startswith(REDACTED):
        return False
    if (name["strong"] or "").lower() == "pwd" and re.match(r"[~.]?[/\\]|[A-Za-z]:\\", value):
        return False  # the shell's working folder
    shape = _KEY_SHAPE if name["bare"] else _TOKEN_SHAPE
    return bool(name["strong"]) or shape.fullmatch(value) is not None


def _hide_places(text: str) -> str:
    """Home folders as ``~``, the machine's name as ``localhost``, files of libraries below their folder."""
    text = _LIBRARIES.sub("", text)
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~/\\-]){re.escape(home)}(?![\w.-])", "~", text)
    text = _COMPILER_CACHE.sub("", _HOMES.sub("~", text))
    if user := _user():
        text = _FOLDERS.sub(lambda match: re.sub(rf"(?<=/){re.escape(user)}(?=/|$)", "user", match[0]), text)
    host = _distinctive_host()
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "localhost", text) if host else text


@functools.cache
def _user() -> str | None:
    """Who runs this, where that is a name; ``root`` and the users of container images are nobody's."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None
    return name if len(name) >= 2 and name not in _NOBODY else None


@functools.cache
def _distinctive_host() -> str | None:
    """This machine's name, or ``None`` when it is a plain word that may well stand in a text by itself."""
    host = socket.gethostname()
    is_distinctive = len(host) >= 4 and not host.startswith("localhost") and re.search(r"[0-9.-]", host)
    return host if is_distinctive else None
