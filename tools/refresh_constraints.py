"""Exact versions of everything fourfold stands on, written to two places from one resolution:

    constraints.txt                             for pip:  pip install -c constraints.txt .
    pyproject.toml, [tool.uv] constraint-dependencies     for uv run and uv sync

    python tools/refresh_constraints.py                       resolve anew, keep the versions that are pinned now
    python tools/refresh_constraints.py --upgrade             the newest of everything that pyproject's ranges allow
    python tools/refresh_constraints.py --upgrade torch ...   the newest of these only
    python tools/refresh_constraints.py --check               offline: exit 1 and say why if the two places disagree

Both hold plain `name==version` lines, one a package, for every platform, extra and group: no address of a registry, no
path, no marker. uv.lock, which has those, is made in a temporary folder and thrown away.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[0-9][0-9a-z.!]*)")
SECTION = re.compile(r"^constraint-dependencies = \[\n(?:(?!\]).*\n)*\]\n", re.MULTILINE)
HEADER = "# Exact versions of everything, tools included: pip install -c constraints.txt . ; uv reads the same list from\n# pyproject.toml. Written by tools/refresh_constraints.py.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, need no network")
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="let these move; without names: all")
    options = parser.parse_args()
    if options.check:
        found = problems(ROOT)
        print("\n".join(found) or f"{len(pinned(ROOT / 'constraints.txt'))} versions, the same in both places")
        return 1 if found else 0
    pins = resolve((ROOT / "pyproject.toml").read_text(), upgrade=options.upgrade)
    write(ROOT, pins=pins)
    print(f"{len(pins)} versions")
    return 0


def resolve(project: str, *, upgrade: list[str] | None) -> list[str]:
    """`name==version` of every package that the project in the text of a pyproject.toml may need, sorted by name."""
    kept = [] if upgrade == [] else [pin for pin in listed(project) if pin.split("==")[0] not in (upgrade or [])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(with_list(project, pins=kept))
        # fewest: one version of a package for all supported Pythons, so that no line needs a marker
        uv = ["uv", "--quiet", "--directory", folder]
        subprocess.run([*uv, "lock", "--fork-strategy", "fewest"], check=True)
        what = ["--all-extras", "--all-groups", "--no-emit-project", "--no-hashes", "--no-annotate", "--no-header"]
        export = [*uv, "export", "--frozen", "--format", "requirements-txt", *what]
        lines = subprocess.run(export, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    return sorted({line.split(";")[0].strip() for line in lines if line.strip()})


def write(root: Path, *, pins: list[str]) -> None:
    (root / "constraints.txt").write_text(HEADER + "".join(f"{pin}\n" for pin in pins))
    project = root / "pyproject.toml"
    project.write_text(with_list(project.read_text(), pins=pins))


def with_list(project: str, *, pins: list[str]) -> str:
    """The text of a pyproject.toml with `pins` as its constraint-dependencies, all else as it was."""
    section = "constraint-dependencies = [\n" + "".join(f'    "{pin}",\n' for pin in pins) + "]\n"
    if SECTION.search(project):
        return SECTION.sub(lambda _: section, project, count=1)
    before, header, after = project.partition("[tool.uv]\n")
    assert header, "pyproject.toml has no [tool.uv]"
    return f"{before}{header}{section}{after}"


def listed(project: str) -> list[str]:
    uv = tomllib.loads(project).get("tool", {}).get("uv", {})
    return [str(pin) for pin in uv.get("constraint-dependencies", [])]


def pinned(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def problems(root: Path) -> list[str]:
    """Why constraints.txt and pyproject.toml are not one list of exact versions within the ranges; empty if they are."""
    text = (root / "pyproject.toml").read_text()
    pins, found = pinned(root / "constraints.txt"), []
    found += [f"constraints.txt: {line!r} is not a plain name==version" for line in pins if not PIN.fullmatch(line)]
    if found:
        return found
    for place, there, other in (("constraints.txt", pins, listed(text)), ("pyproject.toml", listed(text), pins)):
        found += [f"only {place} has {pin}" for pin in sorted(set(there) - set(other))]
    version_of = dict(pin.split("==") for pin in pins)
    if len(version_of) != len(pins):
        found.append("constraints.txt names a package twice")
    for requirement in direct_requirements(text):
        version = version_of.get(canonicalize_name(requirement.name))
        if version is None:
            found.append(f"{requirement.name} has no exact version")
        elif version not in requirement.specifier:
            found.append(f"{requirement.name}=={version} is outside {requirement.specifier}")
    return found


def direct_requirements(project: str) -> list[Requirement]:
    tree = tomllib.loads(project)
    groups = [*tree["project"].get("optional-dependencies", {}).values(), *tree.get("dependency-groups", {}).values()]
    texts = [*tree["project"]["dependencies"], *(item for group in groups for item in group if isinstance(item, str))]
    return [Requirement(text) for text in texts]


if __name__ == "__main__":
    sys.exit(main())
