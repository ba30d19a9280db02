"""The build: the Cython extensions, the host engine, and the kernel sources of wheels. Metadata:
pyproject.toml.

What is built, and where it goes:

- ``collectives/_nccl*.so``: the binding, by Cython and the C compiler.
- ``collectives/_lib/libcollectives_host.so``: the host engine. ``host/*.cpp`` are compiled once,
  ``kernels/host/*.cpp`` once for each instruction set, all objects in parallel; objects newer than
  all they were made from are kept.
- ``collectives/_kernels_src/``: in wheels only, a copy of ``kernels/``, since CUDA kernels are
  compiled at run time. In a checkout (an editable install) that folder isn't there, and
  ``../kernels`` beside the package is the same.

``tools/wheel.py`` makes the sdist and the manylinux wheels.

``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` are honoured. ``python setup.py build_host --output PATH``
builds the engine alone, for instance with ``CXXFLAGS=-fsanitize=address``;
``COLLECTIVES_HOST_LIBRARY`` then names it at run time.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("collectives", "_lib", "libcollectives_host.so")

COMPILE = (
    "-O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -pthread "
    "-Ikernels/include -Ihost".split()
)
LINK = (
    "-shared -pthread -Wl,-Bsymbolic -Wl,-soname,libcollectives_host.so -Wl,-z,defs "
    "-Wl,--version-script=host/exports.map"
).split()
# Not platform.machine(): under a cross compiler this names the machine that is compiled for.
ON_X86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
INSTRUCTION_SETS = {"baseline": []}
if ON_X86:
    INSTRUCTION_SETS["avx2"] = "-mavx2 -mfma -mf16c".split()
    INSTRUCTION_SETS["avx512"] = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c".split()


def cxx():
    """Return the C++ compiler's command as a list: ``CXX``, or the first of g++, c++, clang++ on
    the path.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    if not found or not shutil.which(found[0]):
        looked_for = named[0] if named else "g++, c++, clang++"
        raise PlatformError(
            f"collectives needs a C++17 compiler to build its host engine, and there is none ({looked_for}). "
            "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or set CXX."
        )
    return found


def up_to_date(target, command):
    """Whether ``target`` was made by this very command and is newer than every file it was made
    from.
    """
    stamp, deps = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and stamp.exists() and stamp.read_text() == shlex.join(command)):
        return False
    if not deps.exists():
        return False
    made_from = shlex.split(deps.read_text().replace("\\\n", " ").partition(":")[2])
    newest = max((ROOT / name).stat().st_mtime_ns if (ROOT / name).exists() else 2**63 for name in made_from)
    return newest < target.stat().st_mtime_ns


def run(command):
    """Run a compiler from the root of the tree; its output is shown, its failure is ours."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, flush=True)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\n{done.stdout}\nended with status {done.returncode}")


def compile_object(target, command):
    """Compile one object if it isn't up to date; return whether that was needed."""
    if up_to_date(target, command):
        return False
    target.with_suffix(".cmd").unlink(missing_ok=True)
    # Dated back to the start: a header that is edited while the compiler runs makes the object old.
    start = time.time_ns() - 10_000_000  # file systems' clocks tick up to 10 ms late
    run([*command, "-MMD", "-MF", str(target.with_suffix(".d"))])
    os.utime(target, ns=(start, start))
    target.with_suffix(".cmd").write_text(shlex.join(command))
    return True


def build_host_library(output, objects):
    """Compile and link the host engine into ``output``, with its objects in the folder
    ``objects``.
    """
    compiler = cxx()
    flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    have = ["-DCOLL_HAVE_X86_ISA=1"] if ON_X86 else []
    jobs = [(path, "host", have) for path in ROOT.glob("host/*.cpp")]
    if not jobs:
        raise CompileError(f"no host/*.cpp under {ROOT}: the source tree is incomplete")
    for path in ROOT.glob("kernels/host/*.cpp"):
        jobs += [(path, name, [f"-DCOLL_ISA={name}", *have, *isa]) for name, isa in INSTRUCTION_SETS.items()]
    # The kernels' objects take longest, the larger sources more: begun first, they leave no core
    # idle at the end.
    jobs.sort(key=lambda job: (job[1] == "host", -job[0].stat().st_size, job[0].name, job[1]))
    objects.mkdir(parents=True, exist_ok=True)
    commands = {}
    for path, variant, options in jobs:
        target = (objects / f"{path.stem}.{variant}.o").resolve()
        source = str(path.relative_to(ROOT))
        commands[target] = [*compiler, *COMPILE, *options, *flags, "-c", source, "-o", str(target)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        rebuilt = list(pool.map(compile_object, commands, commands.values()))
    link = [*compiler, *flags, *LINK, *map(str, commands), *shlex.split(os.environ.get("LDFLAGS", ""))]
    stamp = objects / "link.cmd"
    key = shlex.join([*link, str(output.resolve())])
    exports = (ROOT / "host/exports.map").stat().st_mtime_ns
    current = output.exists() and stamp.exists() and stamp.read_text() == key
    if any(rebuilt) or not current or exports >= output.stat().st_mtime_ns:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Linked beside it and renamed over it: a process that has the old one mapped keeps it
        # whole.
        fresh = output.with_name(f".{output.name}.{os.getpid()}")
        run([*link, "-o", str(fresh.resolve())])
        fresh.replace(output)
        stamp.write_text(key)


class BuildHost(Command):
    """Build the host engine alone."""

    description = "build the host engine alone"
    user_options = [
        ("output=", None, "the library to write (default: collectives/_lib/libcollectives_host.so)"),
        ("objects=", None, "folder of the objects (default: build/host)"),
    ]

    def initialize_options(self):
        self.output = None
        self.objects = None

    def finalize_options(self):
        self.output = Path(self.output or ROOT / LIBRARY)
        self.objects = Path(self.objects or ROOT / "build" / "host")

    def run(self):
        build_host_library(self.output, self.objects)


class BuildExt(build_ext):
    """Build the extensions and, beside them, the host engine: into the source tree where it is in
    place or editable.
    """

    def host_library(self):
        return ROOT / LIBRARY if self.inplace or self.editable_mode else Path(self.build_lib) / LIBRARY

    def run(self):
        cxx()  # before the minute that the rest takes
        in_tree = self.host_library() == ROOT / LIBRARY
        # An editable build gets a throw-away build_temp: its objects are kept in the tree instead.
        # The others are of no Python: wheels for several Pythons share them.
        beside_temp = Path(self.build_temp).parent / f"host.{sysconfig.get_platform()}"
        objects = ROOT / "build" / "host" if in_tree else beside_temp
        with ThreadPoolExecutor(1) as beside:
            engine = beside.submit(build_host_library, self.host_library(), objects)
            super().run()
        engine.result()

    def get_outputs(self):
        return [*super().get_outputs(), str(self.host_library())]


class BuildPy(build_py):
    """Copy the package, and into wheels the kernel sources."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "collectives", "_kernels_src")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / "kernels", target)


def extensions():
    """Return the Cython extensions; each depends on all that it includes."""
    return [
        Extension(
            f"collectives.{path.stem}",
            [str(path.relative_to(ROOT))],
            include_dirs=["kernels/include", "collectives"],
            extra_compile_args=["-g0", "-Werror=incompatible-pointer-types", "-Werror=int-conversion"],
            depends=[str(each.relative_to(ROOT)) for each in ROOT.glob(f"collectives/{path.stem}*.[ph]*")]
            + [str(each.relative_to(ROOT)) for each in ROOT.glob("kernels/include/coll/*.h")],
        )
        for path in sorted(ROOT.glob("collectives/_*.pyx"))
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "build_host": BuildHost})
