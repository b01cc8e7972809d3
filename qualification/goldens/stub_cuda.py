"""Lets PyPI's CUDA build of torch import on a machine without CUDA.

It makes hollow libraries under the names that torch links.

Run once in the virtual environment after `pip install --no-deps torch`. Every symbol in a hollow
library is a block of zeroes, so a CUDA call ends the process at once; the CPU path never makes one.
Runtime and profiler have to be the real ones (they are called while torch's libraries load): see
requirements.txt.
"""

import pathlib
import re
import subprocess
import sysconfig

TORCH = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
HOLLOW = re.compile(
    r"^lib(cublas|cublasLt|cudnn|nvrtc|cufft|cusparse|cusparseLt|cusolver|nccl|nvshmem_host|cufile|cuda)\.so\.\d+$"
)
# Libraries whose symbols carry no version, by the prefix of their names.
UNVERSIONED = {
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "nccl",
    "libcufile.so.0": "cuFile",
    "libcuda.so.1": "cu[A-Z]",
}


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wanted():
    """soname -> (symbol versions, symbols) that torch's libraries ask of it."""
    versions, symbols = {}, {}
    for library in TORCH.glob("*.so*"):
        for soname in re.findall(
            r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-W", "-d", library)
        ):
            versions.setdefault(soname, set())
        current = None
        for line in output_of("readelf", "-W", "-V", library).splitlines():
            if "File:" in line:
                current = re.search(r"File: (\S+)", line)[1]
            elif current and (name := re.search(r"Name: (\S+)", line)):
                versions.setdefault(current, set()).add(name[1])
        for symbol, version in re.findall(
            r" U (\w+)(?:@(\S+))?", output_of("nm", "-D", "--undefined-only", library)
        ):
            symbols.setdefault(version, set()).add(symbol)
    for soname, names in sorted(versions.items()):
        if HOLLOW.match(soname):
            prefix = UNVERSIONED.get(soname, "$")
            found = {symbol for symbol in symbols[""] if re.match(prefix, symbol)}
            yield soname, sorted(names), sorted(
                found.union(*(symbols.get(name, set()) for name in names))
            )


def main():
    for soname, versions, symbols in list(wanted()):
        source, script = TORCH / f"{soname}.c", TORCH / f"{soname}.map"
        source.write_text("".join(f"char {symbol}[64];\n" for symbol in symbols))
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
        versioned = [f"-Wl,--version-script,{script}"] if versions else []
        output_of(
            "gcc",
            "-shared",
            "-fPIC",
            source,
            f"-Wl,-soname,{soname}",
            *versioned,
            "-o",
            TORCH / soname,
        )
        source.unlink()
        script.unlink()
        print("hollow", soname, *versions, len(symbols), "symbols")


if __name__ == "__main__":
    main()
