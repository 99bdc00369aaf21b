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
        if hasattr(os, name):
            return getattr(os, name)
        return getattr(shutil, name)

    def write(self, descriptor, data):
        self._note("write", self._path(descriptor))
        return os.write(descriptor, data)

    def fsync(self, descriptor):
        path = self._path(descriptor)
        self._note("fsync", path)
        os.fsync(descriptor)
        if not path.is_dir():
            self._synced[path.stat().st_ino] = path.read_bytes()
            return
        for entry in path.iterdir():
            self._named.add(entry.stat().st_ino)
        elsewhere = []
        for source, target, old in self._unsynced_names:
            if target.parent != path:
                elsewhere.append((source, target, old))
        self._unsynced_names = elsewhere

    def replace(self, source, target):
        self._note("rename", source, target)
        old = None
        if target.is_file():
            old = target.read_bytes()
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
        call = what
        for path in paths:
            name = Path(path).relative_to(self.root).as_posix()
            call += f" {name}"
        self.calls.append(TOKEN.sub("", call))

    def _path(self, descriptor):
        inode = os.fstat(descriptor).st_ino
        for path in itertools.chain([self.root], self.root.rglob("*")):
            if path.stat().st_ino == inode:
                return path
        raise FileNotFoundError(f"no file below {self.root} has inode {inode}")

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
            if inode in self._named or path in renamed:
                if path.is_file():
                    left.write_bytes(self._content_after_a_power_cut(path))
            elif path.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        for source, target, old in reversed(lost):
            old_name = view / source.relative_to(self.root)
            new_name = view / target.relative_to(self.root)
            if new_name.exists():
                os.replace(new_name, old_name)
                if old is not None:
                    new_name.write_bytes(old)
        return view

    def _content_after_a_power_cut(self, path):
        content = self._synced.get(path.stat().st_ino, b"")
        if self._zeros:
            content = content.ljust(path.stat().st_size, b"\0")
        return content
