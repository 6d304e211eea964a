"""Generate ``key_shapes.toml`` from the rules of CredSweeper (MIT licence), a maintained scanner for credentials.

    pip download --no-deps credsweeper
    python -m tests.snapshot.key_shapes credsweeper-*.whl

The file keeps the rules that recognise a key by its own shape. Left out are rules that need the name before a value
(`reprokit.snapshot.redact` has its own), a language model or a decoder, and shapes that ordinary words have.
Lengths are relaxed where the prefix is distinctive: a key of another length is still a key.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import reprokit

TOO_GENERAL = frozenset(
    (
        *("UUID", "Product Activation Key", "Firebase Domain", "AWS S3 Bucket", "Tencent WeChat API App ID"),
        *("Dropbox App secret", "NKEY Seed", "OTP / 2FA Secret", "Composio Credentials", "Salesforce Credentials"),
        *("BASE64 Private Key", "BASE64 encoded PEM Private Key", "Basic Authorization", "Bearer Authorization"),
        "Azure Access Token",  # a JSON web token
    )
)
_BEFORE = re.compile(r"\A\(\?:\^\|/\|.*?0,80\}m\)(?=\(\?)")  # what may stand before a key: `BEFORE` says the same
_AFTER = re.compile(r"\(\?!\\?[^()]*\)\Z")
_LENGTH = re.compile(r"\{(\d+)(?:,\d+)?\}")
BEFORE = r"(?:(?<![0-9A-Za-z])|(?<=\\[0abfnrtv])|(?<=%[0-9A-Fa-f]{2})|(?<=\\x[0-9A-Fa-f]{2})|(?<=[0-9\[;]m))"
# Services of machine learning that the rules do not know, and the many keys that begin as OpenAI's do.
ADDED = {
    "Cerebras": "csk-",
    "Fireworks": "fw_",
    "Jina": "jina_",
    "Kaggle": "KGAT_",
    "LangSmith": "lsv2_",
    "NVIDIA": "nvapi-",
    "OpenAI and alike": "sk-",
    "Replicate": "r8_",
    "RunPod": "rpa_",
    "W&B": "wandb_v1_",
}
SHORTEST = 16
LONGEST = 512  # of one part of a key, so that the search takes linear time; the rest of a longer one is hidden with it


def shapes_of(rules: list[dict[str, Any]]) -> list[tuple[str, list[str], str]]:
    """Name, texts of which one is in every match, and pattern of each rule that is kept."""
    kept = [
        (rule["name"], rule["required_substrings"], _pattern(rule["values"][0], rule["required_substrings"]))
        for rule in rules
        if rule["type"] == "pattern" and not rule.get("use_ml") and rule["name"] not in TOO_GENERAL
    ]
    added = [(name, [text], f"{BEFORE}(?P<value>{text}[0-9A-Za-z_-]{{20,{LONGEST}}})") for name, text in ADDED.items()]
    return kept + added


def _pattern(pattern: str, contains: list[str]) -> str:
    pattern = _BEFORE.sub(lambda _: BEFORE, pattern)
    if pattern.startswith("(?P<value>eyJ"):  # base64 of `{"`, which a long text in base64 may repeat
        pattern = BEFORE + pattern
    if all(len(text) >= 4 or text == "eyJ" or (text[-1] in "_-" and len(text) > 2) for text in contains):
        pattern = _LENGTH.sub(_relaxed, _AFTER.sub("", pattern))
    return re.sub(r",\d{3,}\}", f",{LONGEST}}}", pattern)


def _relaxed(length: re.Match[str]) -> str:
    return f"{{{SHORTEST},{LONGEST}}}" if int(length[1]) >= SHORTEST else length[0]


def main(wheel: Path) -> None:
    """Write the file from the wheel, its version and its licence."""
    import yaml  # type: ignore[import-untyped]

    with zipfile.ZipFile(wheel) as archive:
        rules = yaml.safe_load(archive.read("credsweeper/rules/config.yaml"))
        licence = next(name for name in archive.namelist() if name.endswith("/LICENSE"))
        notice = archive.read(licence).decode()
    head = [f"Shapes of keys, from {wheel.name}; `python -m tests.snapshot.key_shapes` writes this file.", ""]
    lines = [f"# {line}".rstrip() for line in (*head, *notice.splitlines())]
    for name, contains, pattern in shapes_of(rules):
        quoted = ", ".join(f"'{text}'" for text in contains)
        lines += ["", "[[shape]]", f"name = '{name}'", f"contains = [{quoted}]", f"pattern = '''{pattern}'''"]
    file = Path(reprokit.__file__).parent / "snapshot" / "key_shapes.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
