"""What a crash may leave of a folder: copies of it after each change of a name."""

import itertools
import os
import re
import shutil
from pathlib import Path

TOKEN = re.compile(r"\.[0-9a-f]{8}(?=\.partial)")  # of a partial file's name


class Disk:
    """Stands in for `os` and `shutil` in the modules that write runs.

    `calls` are those made, with names relative to `root`; `views` are copies of `root` as crashes
    may have left it after each change of a name.
    """

    def __init__(self, root: Path, views: Path, *, zeros: bool = False) -> None:
        """With `zeros`, a power cut leaves a file's length, and zeros where it was not synced."""
        self.root = root
        self._views = views
        self._zeros = zeros
        self.calls: list[str] = []
        self.views: list[Path] = []
        self._synced: dict[int, bytes] = {}
        self._named: set[int] = set()
        self._unsynced_names: list[tuple[Path, Path, bytes | None]] = []

    def __getattr__(self, name):
        return getattr(os if hasattr(os, name) else shutil, name)

    def write(self, descriptor, data):
        self._note("write", self._path(descriptor))
        return os.write(descriptor, data)

    def fsync(self, descriptor):
        path = self._path(descriptor)
        self._note("fsync", path)
        os.fsync(descriptor)
        if path.is_dir():
            self._named |= {entry.stat().st_ino for entry in path.iterdir()}
            self._unsynced_names = [each for each in self._unsynced_names if each[1].parent != path]
        else:
            self._synced[path.stat().st_ino] = path.read_bytes()

    def replace(self, source, target):
        self._note("rename", source, target)
        old = target.read_bytes() if target.is_file() else None
        os.replace(source, target)
        self._unsynced_names.append((source, target, old))
        self._crash()

    def rmtree(self, path, ignore_errors=False):
        if not Path(path).exists():
            return
        self._note("delete", path)
        for manifest_file in Path(path).rglob("manifest.json"):
            manifest_file.unlink()
            self._crash()  # half deleted
        shutil.rmtree(path, ignore_errors=ignore_errors)
        self._crash()

    def _note(self, what, *paths):
        names = (Path(path).relative_to(self.root).as_posix() for path in paths)
        self.calls.append(TOKEN.sub("", " ".join([what, *names])))

    def _path(self, descriptor):
        inode = os.fstat(descriptor).st_ino
        everything = itertools.chain([self.root], self.root.rglob("*"))
        return next(path for path in everything if path.stat().st_ino == inode)

    def _crash(self):
        """Keep all that a crash may leave now: of the unsynced names any may be lost."""
        self.views.append(self._copy())
        for count in range(len(self._unsynced_names) + 1):
            for lost in itertools.combinations(self._unsynced_names, count):
                self.views.append(self._after_a_power_cut(lost))

    def _copy(self):
        return Path(shutil.copytree(self.root, self._views / str(len(self.views))))

    def _after_a_power_cut(self, lost):
        view = self._copy()
        renamed = [target for _, target, _ in self._unsynced_names]
        for path in sorted(self.root.rglob("*"), reverse=True):  # what is in a folder goes first
            left = view / path.relative_to(self.root)
            inode = path.stat().st_ino
            if inode not in self._named and path not in renamed:
                shutil.rmtree(left) if path.is_dir() else left.unlink()
            elif path.is_file():
                content = self._synced.get(inode, b"")
                if self._zeros:
                    content = content.ljust(path.stat().st_size, b"\0")
                left.write_bytes(content)
        for source, target, old in reversed(lost):
            source, target = (view / path.relative_to(self.root) for path in (source, target))
            if target.exists():
                os.replace(target, source)
                if old is not None:
                    target.write_bytes(old)
        return view
