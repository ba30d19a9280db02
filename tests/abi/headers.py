"""Our declarations of NCCL's C API against the real ``nccl.h``, as a C++ source that compiles only where they agree.

Our header is put into a namespace of its own and stripped of ``extern "C"``, so that both fit into one source. ``same``
then compares types by structure, with each of our structs and enums standing for the real one of that name. The real
header may be older or newer than ours: what it can't know yet is left out by the version tables of the binding.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.rank_process import ROOT

HERE = Path(__file__).resolve().parent
OUR_HEADERS = (ROOT / "kernels/include/coll/nccl_abi.h", ROOT / "collectives/_nccl_table.h")
INITIALIZER = "NCCL_CONFIG_INITIALIZER"  # of ncclConfig_t

SAME = """
#include <type_traits>
template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };
template <class A, class B> struct same<const A, const B> : same<A, B> {};
template <class A> struct same<const A, const A> { static constexpr bool value = true; };
template <class A, class B> struct same<A*, B*> : same<A, B> {};
template <class A> struct same<A*, A*> { static constexpr bool value = true; };
template <class A, class B, size_t N> struct same<A[N], B[N]> : same<A, B> {};
template <class A, size_t N> struct same<A[N], A[N]> { static constexpr bool value = true; };
template <class... T> struct list {};
template <class A, class B> struct same_list { static constexpr bool value = false; };
template <> struct same_list<list<>, list<>> { static constexpr bool value = true; };
template <class A, class... As, class B, class... Bs> struct same_list<list<A, As...>, list<B, Bs...>> {
  static constexpr bool value = same<A, B>::value && same_list<list<As...>, list<Bs...>>::value;
};
template <class R, class... A, class S, class... B> struct same<R(A...), S(B...)> {
  static constexpr bool value = same<R, S>::value && same_list<list<A...>, list<B...>>::value;
};
template <class R, class... A> struct same<R(A...), R(A...)> { static constexpr bool value = true; };
"""


def real_header() -> Path:
    """The nccl.h of the nvidia-nccl wheel, which the test extra installs."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    assert spec is not None, "no NCCL with its nccl.h: pip install nvidia-nccl-cu12 (or -cu13)"
    return Path(next(iter(spec.submodule_search_locations))) / "include" / "nccl.h"


def real_library() -> Path:
    return real_header().parent.parent / "lib" / "libnccl.so.2"


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def version_code(header: str) -> int:
    return int(re.search(r"#define\s+NCCL_VERSION_CODE\s+(\d+)", header)[1])


def public_functions(header: str) -> set[str]:
    """The ncclX functions that a header declares (not their pncclX doubles)."""
    plain = re.sub(r"^\s*#.*$", "", without_comments(header), flags=re.M)
    return set(re.findall(r"\b(nccl[A-Z]\w*)\s*\([^()]*\)\s*;", plain))


@dataclass
class Ours:
    """What our header declares."""

    text: str
    constants: dict[str, str]
    enumerators: list[str]
    types: list[str]  # typedef'd structs and enums
    opaque: list[str]  # typedef'd pointers to structs that stay closed
    fields: dict[str, list[str]]
    functions: list[str]


def our_declarations(text: str) -> Ours:
    text = without_comments(text)
    enums = re.findall(r"typedef enum\s*\{(.*?)\}\s*(\w+);", text, re.S)
    structs = [
        (found[1], found[2])
        for found in re.finditer(r"typedef struct\s*\w*\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*(\w+);", text, re.S)
        if found[2].startswith("nccl")
    ]
    fields = {}
    for body, name in structs:
        flat = re.sub(r"\{[^{}]*\}", "", body)
        fields[name] = re.findall(r"(\w+)\s*(?:\[\w+\])?\s*;", flat)
    return Ours(
        text=text,
        constants=dict(re.findall(r"#define (NCCL_\w+) (\S.*)", text)),
        enumerators=re.findall(r"(\w+) =", " ".join(body for body, _ in enums)),
        types=[name for _, name in enums] + [name for _, name in structs],
        opaque=re.findall(r"typedef struct \w+\* (\w+);", text),
        fields=fields,
        functions=sorted(public_functions(text)),
    )


def our_text() -> str:
    """Our declarations of NCCL's."""
    return OUR_HEADERS[0].read_text()


def field_table() -> list[tuple[str, int, str]]:
    """(field, first version, value when not set) of ncclConfig_t, as the binding fills it."""
    table = OUR_HEADERS[1].read_text()
    unset = {"i": "NCCL_CONFIG_UNDEF_INT", "s": "nullptr"}
    body = table[table.index("#define COLL_CONFIG_FIELDS(F)") :].split("\n\n")[0]
    return [(name, int(code), unset[kind]) for name, code, kind in re.findall(r"F\((\w+), (\d+), '(\w)'\)", body)]


def check_source(ours: Ours, header: str, since: dict[str, int]) -> str:
    """The C++ source. ``since``: the first versions of functions."""
    defaults = field_table()
    field_since = {name: code for name, code, _ in defaults}
    version = version_code(header)
    same_minor = version // 100 == int(ours.constants["NCCL_VERSION_CODE"]) // 100
    plain = re.sub(r"#ifdef __cplusplus.*?#endif", "", ours.text, flags=re.S)  # extern "C" and its end
    plain = re.sub(r"^\s*#.*$", "", plain, flags=re.M)
    for name, value in sorted(ours.constants.items(), key=lambda item: -len(item[0])):
        plain = re.sub(rf"\b{name}\b", value, plain)
    lines = ["#include <limits.h>", "#include <stddef.h>", "#include <stdint.h>", f"namespace ours {{\n{plain}\n}}"]
    lines += ["#include <nccl.h>", SAME]

    def there(name: str) -> bool:
        return re.search(rf"\b{name}\b", header) is not None

    def require(condition: str) -> None:
        lines.append(f"static_assert({condition});")

    types = [name for name in ours.types if there(name)]
    pairs = [(f"::{name}", f"ours::{name}") for name in types]
    pointee = "std::remove_pointer_t<{}>".format
    pairs += [(pointee(f"::{name}"), pointee(f"ours::{name}")) for name in ours.opaque if there(name)]
    for real, mine in pairs:
        lines.append(f"template <> struct same<{real}, {mine}> {{ static constexpr bool value = true; }};")
    for name, value in ours.constants.items():
        if name == "NCCL_VERSION_CODE" and not same_minor:
            continue
        if there(name):
            require(f"({name}) == ({value})")
    for name in ours.enumerators:
        if there(name) and (same_minor or name not in ("ncclNumTypes", "ncclNumResults")):
            require(f"(long long)::{name} == (long long)ours::{name}")
    for name in types:
        known = [each for each in ours.fields.get(name, ()) if field_since.get(each, 0) <= version]
        for field in known:
            require(f"offsetof(::{name}, {field}) == offsetof(ours::{name}, {field})")
            require(f"sizeof(((::{name}*)0)->{field}) == sizeof(((ours::{name}*)0)->{field})")
            require(f"same<decltype(::{name}::{field}), decltype(ours::{name}::{field})>::value")
        if same_minor:
            require(f"sizeof(::{name}) == sizeof(ours::{name})")
    for function in ours.functions:
        if since.get(function, 0) <= version:
            require(f"same<decltype(::{function}), decltype(ours::{function})>::value")
    lines.append(f"constexpr ncclConfig_t fresh = {INITIALIZER};")
    require(f"fresh.magic == {ours.constants['NCCL_API_MAGIC']}")
    require("fresh.size == sizeof(ncclConfig_t)")
    # A field that isn't set must look to the library as the real initializer leaves it.
    for field, since_version, value in defaults:
        if since_version <= version:
            require(f"fresh.{field} == {value}")
    return "\n".join(lines) + "\n"


def compiles(source: str, header: Path, folder: Path) -> tuple[bool, str]:
    """Whether a C++ source compiles against the given nccl.h, and the compiler's words."""
    path = folder / "check.cpp"
    path.write_text(source)
    include = folder / "include"
    include.mkdir(exist_ok=True)
    (include / "nccl.h").write_bytes(header.read_bytes())
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{HERE / 'fake_cuda'}", f"-I{include}"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
    return done.returncode == 0, done.stderr
