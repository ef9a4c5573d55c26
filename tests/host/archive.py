"""The published archive: which files it holds and what the registry would object to in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pathspec

REPO = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {".py", ".js", ".mjs", ".md", ".json", ".toml", ".txt", ".html", ".css", ".yaml"}

# What the registry's publish-time scan and policy review were seen to flag. They also match plain
# text in documents, so documents are scanned like code.
BANNED: dict[str, str] = {
    "shell or child process": r"\bos\s*\.\s*(system|popen|exec[lv]p?e?|spawn\w+|fork)\b"
    r"|\bsubprocess\b|\bmultiprocessing\b|\bpty\b",
    "code execution": r"(?<![\w.])(eval|exec)\s*\(|\bnew\s+Function\s*\(|\b__import__\s*\(",
    "pickle": r"\bimport\s+(c?pickle|dill|cloudpickle|marshal)\b|\bpickle\.loads?\b",
    "environment variables": r"\bos\s*\.\s*(environ|getenv|putenv)\b",
    "network module": r"\b(import|from)\s+(requests|urllib\w*|socket\w*|http\.client|httpx|ftplib"
    r"|smtplib|websockets?|aiohttp\.client|xmlrpc|telnetlib)\b|\bClientSession\b",
    "hub download": r"\b(hf_hub_download|snapshot_download|load_state_dict_from_url|torch\.hub)\b",
    "raw file link": r"raw\.githubusercontent|github\.com/\S+/raw/",
    "package installation": r"\bpip3?\s+install\b.*\b(subprocess|sys\.executable)\b|\bensurepip\b",
}
BANNED_JS: dict[str, str] = {
    "connection": r"\.\s*(connect|bind)\s*\(|\bnew\s+(WebSocket|EventSource|XMLHttpRequest)\b",
    "foreign address": r"""(fetch|import)\s*\(\s*['"`](https?:)?//|\bfrom\s+['"]https?://""",
}


@dataclass(frozen=True)
class Finding:
    """One line of one file that the registry would flag."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text.strip()[:120]}"


def pack_files(*, tracked_only: bool = True) -> list[str]:
    """Return the archive's files as the registry's client chooses them, sorted, with `/`.

    Args:
        tracked_only: True for the git-tracked files, as at publication; False also takes new
            files that git does not ignore, so that tests see the working tree.
    """
    options = ["--cached"] if tracked_only else ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=REPO, capture_output=True, check=True
    )
    names = [name for name in listed.stdout.decode("utf-8").split("\0") if name]
    lines = (REPO / ".comfyignore").read_text(encoding="utf-8").splitlines()
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    return sorted(
        {name for name in names if not ignored.match_file(name) and (REPO / name).is_file()}
    )


def build_archive(target: Path, *, tracked_only: bool = True) -> Path:
    """Write the archive as a zip file and return its path."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in pack_files(tracked_only=tracked_only):
            archive.write(REPO / name, name)
    return target


def install_pack(folder: Path, *, tracked_only: bool = False) -> Path:
    """Copy the archive's files into `folder`, as the installer unpacks them, and return it."""
    for name in pack_files(tracked_only=tracked_only):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / name, target)
    return folder


def scan_text(name: str, text: str) -> list[Finding]:
    """Return every line of one file that a rule matches."""
    rules = dict(BANNED)
    if name.endswith((".js", ".mjs", ".html")):
        rules |= BANNED_JS
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for rule, pattern in rules.items():
            if re.search(pattern, line):
                found.append(Finding(name, number, rule, line))
    return found


def scan_archive(*, tracked_only: bool = False) -> list[Finding]:
    """Scan every text file of the archive."""
    found = []
    for name in pack_files(tracked_only=tracked_only):
        if Path(name).suffix in TEXT_SUFFIXES:
            found += scan_text(name, (REPO / name).read_text(encoding="utf-8"))
    return found
