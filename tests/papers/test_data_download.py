"""Downloads, from a server of one's own: broken lines, wrong bytes, servers of all manners."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ritz.papers.data import Archive, DataSet, File, download

CONTENT = bytes(range(256)) * 40
NUM = len(CONTENT)


@dataclass
class Server:
    """What a server has and how it behaves; `asked` is the path and the range of every request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut: int | None = None  # bytes of one answer after which the line breaks
    shift: int = 0  # a server that answers a range with another one
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append((handler.path, wanted))
        content = self.files.get(handler.path)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if content is None:
            handler.send_error(404)
        elif start >= len(content):
            handler.send_error(416)
        else:
            start += self.shift if wanted else 0
            handler.send_response(206 if wanted and self.ranges else 200)
            if wanted and self.ranges:
                handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            handler.send_header("Content-Length", str(len(content) - start))
            handler.end_headers()
            handler.wfile.write(content[start:][: self.cut])


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        served.url = f"http://127.0.0.1:{listening.server_port}/data/"
        try:
            yield served
        finally:
            listening.shutdown()
            thread.join()


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def text(server: Server, content: bytes = CONTENT) -> DataSet:
    """A data set of one file, which the server has under another name."""
    server.files["/data/remote.txt"] = content
    archive = Archive("remote.txt", "text/local.txt", md5(CONTENT), NUM)
    return DataSet(name="own", form="text", train=(File("text/local.txt", md5(CONTENT), archive),), urls=(server.url,))


@pytest.fixture
def target(tmp_path) -> Path:
    (tmp_path / "text").mkdir()
    return tmp_path / "text" / "local.txt"


def part_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def test_a_file_is_received_checked_and_put_in_its_place(server, tmp_path):
    seen: list[tuple[int, int]] = []
    assert download(text(server), tmp_path / "new", progress=lambda *at: seen.append(at)) == tmp_path / "new"
    assert (tmp_path / "new" / "text" / "local.txt").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new" / "text").iterdir()] == ["local.txt"]
    assert server.asked == [("/data/remote.txt", None)]
    assert seen == sorted(seen)
    assert seen[-1] == (NUM, NUM)


def test_what_is_there_and_right_is_left_alone_without_asking_anyone(server, tmp_path, target):
    target.with_name("local.txt.gz").write_bytes(gzip.compress(CONTENT))  # gzipped by somebody else: right as well
    seen: list[tuple[int, int]] = []
    download(text(server), tmp_path, progress=lambda *at: seen.append(at))
    assert (server.asked, seen, target.exists()) == ([], [(NUM, NUM)], False)


def test_a_part_is_gone_on_with(server, tmp_path, target):
    part_of(target).write_bytes(CONTENT[:1000])
    download(text(server), tmp_path)
    assert server.asked == [("/data/remote.txt", "bytes=1000-")]
    assert target.read_bytes() == CONTENT
    assert not part_of(target).exists()


def test_a_server_without_ranges_is_read_from_the_start(server, tmp_path, target):
    server.ranges = False
    part_of(target).write_bytes(CONTENT[:1000])
    download(text(server), tmp_path)
    assert target.read_bytes() == CONTENT


def test_a_line_that_breaks_again_and_again_is_taken_up_again_and_again(server, tmp_path, target):
    server.cut = 4000
    download(text(server), tmp_path)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=4000-", "bytes=8000-"]
    assert target.read_bytes() == CONTENT


def test_a_file_that_stays_truncated_is_refused_and_its_part_kept_for_the_next_call(server, tmp_path, target):
    server.cut, server.ranges = 4000, False
    with pytest.raises(
        OSError, match=r"remote\.txt: it ends after 4000 of 10240 bytes; 4000 bytes are kept in .*\.part"
    ):
        download(text(server), tmp_path)
    assert not target.exists()
    server.cut, server.ranges, server.asked = None, True, []
    download(text(server), tmp_path)
    assert [wanted for _, wanted in server.asked] == ["bytes=4000-"]
    assert target.read_bytes() == CONTENT


def test_a_server_that_has_less_than_the_part_is_read_from_the_start_and_found_short(server, tmp_path, target):
    part_of(target).write_bytes(CONTENT[:1000])
    with pytest.raises(OSError, match="it ends after 500 of 10240 bytes"):
        download(text(server, CONTENT[:500]), tmp_path)
    assert not target.exists()


def test_wrong_bytes_are_refused_and_removed(server, tmp_path, target):
    with pytest.raises(OSError, match=rf"the md5 of what it gave is .*, not {md5(CONTENT)}; it was removed$"):
        download(text(server, CONTENT[::-1]), tmp_path)
    assert not list(target.parent.iterdir())
    assert len(server.asked) == 1


def test_wrong_bytes_over_a_line_that_breaks_are_refused_too(server, tmp_path):
    server.cut = 4000
    with pytest.raises(OSError, match="the md5 of what it gave"):
        download(text(server, CONTENT[::-1]), tmp_path)
    assert len(server.asked) == 3


def test_a_wrong_part_is_given_up_and_all_is_received_again(server, tmp_path, target):
    for size in (1000, NUM, NUM + 1):
        part_of(target).write_bytes(bytes(size))
        download(text(server), tmp_path)
        assert target.read_bytes() == CONTENT
        target.unlink()


def test_more_bytes_than_the_file_has_are_refused_and_removed(server, tmp_path, target):
    seen: list[tuple[int, int]] = []
    with pytest.raises(OSError, match="it gave more than the 10240 bytes of the official file"):
        download(text(server, CONTENT + b"!"), tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert not list(target.parent.iterdir())
    assert all(done <= total for done, total in seen)


def test_a_server_that_gives_another_range_is_refused(server, tmp_path, target):
    server.shift = 1
    part_of(target).write_bytes(CONTENT[:1000])
    with pytest.raises(OSError, match="it gave bytes 1001-10239/10240 when asked for bytes from 1000 on"):
        download(text(server), tmp_path)
    assert part_of(target).read_bytes() == CONTENT[:1000]


def test_a_file_that_no_server_has_is_an_error_with_what_each_said(server, tmp_path):
    with pytest.raises(
        OSError, match=r"no server gave remote\.txt: .*/none/remote.txt: .*404.*; .*/null/remote.txt: .*404"
    ):
        download(text(server), tmp_path, urls=[f"{server.url}none", f"{server.url}null/"])
    with pytest.raises(OSError, match=r"no server gave remote\.txt: urls names none"):
        download(text(server), tmp_path, urls=[])


def test_the_next_server_goes_on_where_the_first_one_stopped(server, tmp_path, target):
    data = text(server)
    server.files |= {"/bad/remote.txt": CONTENT[:3000], "/wrong/remote.txt": bytes(NUM)}
    base = server.url.removesuffix("data/")
    download(data, tmp_path, urls=[f"{base}missing/", f"{base}bad/", f"{base}wrong/", server.url])
    assert target.read_bytes() == CONTENT
    assert ("/wrong/remote.txt", "bytes=3000-") in server.asked


def test_a_server_that_does_not_listen_is_an_error_of_that_server(server, tmp_path):
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9/remote\.txt: .*refused"):
        download(text(server), tmp_path, urls=["http://127.0.0.1:9"])


def test_a_file_in_the_place_that_is_not_the_official_one_is_kept_aside(server, tmp_path, target):
    target.write_bytes(b"mine")
    with pytest.raises(OSError, match="404"):
        download(text(server), tmp_path, urls=[f"{server.url}none"])
    assert target.read_bytes() == b"mine"
    download(text(server), tmp_path)
    assert target.read_bytes() == CONTENT
    assert target.with_name("local.txt.bad").read_bytes() == b"mine"


def test_an_unpacked_file_that_is_wrong_does_not_hide_the_archive(server, tmp_path):
    server.files["/data/x.gz"] = raw = gzip.compress(CONTENT)
    file = File("raw/x", md5(CONTENT), Archive("x.gz", "raw/x.gz", md5(raw), len(raw)))
    data = DataSet(name="own", form="text", train=(file,), urls=(server.url,))
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "x").write_bytes(b"mine")
    for _ in range(2):  # the second time there is nothing to do
        download(data, tmp_path)
        assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["x.bad", "x.gz"]
    assert len(server.asked) == 1


def test_without_a_folder_a_download_is_refused(server, monkeypatch, tmp_path):
    monkeypatch.delenv("RITZ_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="no folder with own: set RITZ_DATA or give root="):
        download(text(server))
    monkeypatch.setenv("RITZ_DATA", str(tmp_path))
    assert download(text(server)) == tmp_path


# ----------------------------------------------------------------------------------------------- archives


def packed(**members: bytes) -> bytes:
    """A gzipped tar of files in a folder, with a link and a file outside beside them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"batches/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name in ("../outside", "batches/readme"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("batches/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return file.getvalue()


def batches(server: Server, raw: bytes, *names: str) -> DataSet:
    """A data set in CIFAR's manner: files that come in one archive, which holds them or not."""
    server.files["/data/all.tar.gz"] = raw
    archive = Archive("all.tar.gz", "all.tar.gz", md5(raw), len(raw))
    files = tuple(File(f"batches/{name}", md5(name.encode()), archive) for name in names)
    return DataSet(name="own", form="pickle", train=files[:-1], test=files[-1:], urls=(server.url,))


def test_the_files_of_the_table_are_taken_out_of_an_archive_and_no_others(server, tmp_path):
    root = tmp_path / "root"
    data = batches(server, packed(one=b"one", two=b"two"), "one", "two")
    download(data, root)
    assert sorted(path.name for path in (root / "batches").iterdir()) == ["one", "two"]
    assert (root / "batches" / "two").read_bytes() == b"two"
    assert not (tmp_path / "outside").exists()
    download(data, root)
    assert len(server.asked) == 1
    (root / "batches" / "one").write_bytes(b"other")  # the archive is there still
    download(data, root)
    assert len(server.asked) == 1
    assert (root / "batches" / "one").read_bytes() == b"one"
    assert (root / "batches" / "one.bad").read_bytes() == b"other"


def test_an_archive_without_a_file_or_with_another_is_refused(server, tmp_path):
    raw = packed(one=b"one", two=b"other")
    with pytest.raises(ValueError, match=r"batches/two in .*all\.tar\.gz has md5 .*, not"):
        download(batches(server, raw, "one", "two"), tmp_path)
    assert not list(tmp_path.glob("batches/two*"))
    for missing in ("three", "link"):
        with pytest.raises(ValueError, match=rf"all\.tar\.gz does not hold batches/{missing}"):
            download(batches(server, raw, "one", missing), tmp_path)


def test_progress_is_of_all_archives_together(server, tmp_path):
    first = text(server)
    server.files["/data/second.txt"] = CONTENT[:100]
    second = File(
        "text/second.txt", md5(CONTENT[:100]), Archive("second.txt", "text/second.txt", md5(CONTENT[:100]), 100)
    )
    seen: list[tuple[int, int]] = []
    download(replace(first, test=(second,)), tmp_path, progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (NUM + 100, NUM + 100)
