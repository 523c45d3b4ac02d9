# SPDX-License-Identifier: Apache-2.0
"""Pack trained files into a few parts of bounded size, and unpack them.

usage: python -m benchmarks.training.pack WORK OUT NAME...    OUT/trained.NN from WORK/NAME
       python -m benchmarks.training.pack --unpack IN OUT     from IN/trained.NN into OUT

Weights are two bytes a number. The bytes with the exponents compress well, the others do not, so
each half of a file is compressed for itself. Names that come first are packed first; what does not
fit in all parts is left out, and said.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PART = int(15.4 * 2**20)
WEIGHTS = (".safetensors", ".pt")


def squeeze(data: bytes, halves: bool) -> bytes:
    """Compressed bytes; `halves`: even and odd bytes apart."""
    if not halves:
        return zlib.compress(data, 9)
    array = np.frombuffer(data, np.uint8)
    even, odd = (zlib.compress(array[i::2].tobytes(), 6) for i in (0, 1))
    return len(even).to_bytes(8, "little") + even + odd


def expand(data: bytes, halves: bool) -> bytes:
    if not halves:
        return zlib.decompress(data)
    size = int.from_bytes(data[:8], "little")
    even, odd = (zlib.decompress(part) for part in (data[8 : 8 + size], data[8 + size :]))
    out = np.empty(len(even) + len(odd), np.uint8)
    out[0::2], out[1::2] = (np.frombuffer(part, np.uint8) for part in (even, odd))
    return out.tobytes()


def pack(work: Path, out: Path, names: list[str], most: int) -> None:
    files: list[Path] = []
    for name in names:
        found = sorted(work.glob(name))
        if not found:
            print(f"{name} is missing")
        for path in found:
            files += [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(lambda f: squeeze(f.read_bytes(), f.suffix in WEIGHTS), files))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file, data in zip(files, packed, strict=True):
            if buffer.tell() + len(data) + 20_000 > most * PART:
                print(f"no room for {file}")
                continue
            info = tarfile.TarInfo(str(file.relative_to(work)))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, len(data), PART)):
        (out / f"trained.{number:02d}").write_bytes(data[begin : begin + PART])
    print(f"{len(files)} files, {len(data) / 2**20:.1f} MiB")


def unpack(source: Path, out: Path) -> None:
    data = b"".join(file.read_bytes() for file in sorted(source.glob("trained.*")))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            stream = tar.extractfile(member)
            file = out / member.name
            if stream is None or not file.resolve().is_relative_to(out.resolve()):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(expand(stream.read(), file.suffix in WEIGHTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unpack", action="store_true")
    parser.add_argument("--parts", type=int, default=4, help="most parts")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="files, folders or patterns")
    args = parser.parse_args()
    if args.unpack:
        unpack(args.source, args.out)
    else:
        pack(args.source, args.out, args.names, args.parts)


if __name__ == "__main__":
    main()
