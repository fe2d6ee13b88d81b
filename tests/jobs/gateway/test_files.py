"""`/v1/files` as the SDK uses it, and as those use it who mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from jobs.gateway.errors import ApiError
from jobs.gateway.files import StoredFile
from jobs.gateway.uploads import MAX_FILENAME_CHARACTERS, shown_filename
from storage import files
from storage.database import Database
from storage.models import FilePurpose
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import MakeGateway, RunningGateway, changed, chat_line, jsonl, upload
from tests.jobs.gateway.processes import gateway_process

LINES = jsonl([chat_line("a"), chat_line("b")])
FIELDS = {"id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status", "status_details"}


def post(gateway: RunningGateway, *, fields: dict[str, str], file: tuple[str, bytes] | None, **headers: str) -> Any:
    """An upload without the SDK's help."""
    return httpx.post(
        f"{gateway.url}/v1/files",
        data=fields,
        files={"file": file} if file else {"other": ("x", b"y")},
        headers={"authorization": f"Bearer {gateway.key()}", **headers},
        trust_env=False,
    )


def in_folder(gateway: RunningGateway) -> list[str]:
    return sorted(path.name for path in gateway.settings.files_dir.iterdir())


@contextlib.contextmanager
def leaves(gateway: RunningGateway, files: int = 0) -> Iterator[None]:
    """The block adds so many files to the folder, sooner or later."""
    before = len(in_folder(gateway))
    yield
    wait_until(lambda: len(in_folder(gateway)) == before + files, what="an orderly files folder")


class TestUpload:
    def test_every_field_of_the_file_object_is_there(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        before = int(time.time()) - 1
        raw = client.files.with_raw_response.create(file=("in.jsonl", LINES), purpose="batch")
        assert raw.headers["x-request-id"].startswith("req_")
        made = raw.http_response.json()
        assert set(made) == FIELDS
        assert (made["object"], made["purpose"], made["status"]) == ("file", "batch", "processed")
        assert (made["filename"], made["bytes"], made["status_details"]) == ("in.jsonl", len(LINES), None)
        assert made["id"].startswith("file-")
        assert before <= made["created_at"] <= time.time() + 1
        assert made["expires_at"] - made["created_at"] == 30 * 86_400
        assert client.files.retrieve(made["id"]).to_dict() == made
        assert client.files.content(made["id"]).content == LINES
        assert client.files.wait_for_processing(made["id"], poll_interval=0.01).id == made["id"]

    def test_the_same_upload_again_gives_the_same_file(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        """An SDK whose answer was lost sends the file again by itself."""
        first = upload(client, [chat_line("a")])
        assert upload(client, [chat_line("a")]).id == first.id
        assert len(in_folder(gateway)) == 1
        assert upload(client, [chat_line("b")]).id != first.id
        assert upload(client, [chat_line("a")], "other.jsonl").id != first.id
        with gateway.client("another") as another:
            assert upload(another, [chat_line("a")]).id != first.id

    def test_of_two_equal_uploads_at_once_one_file_comes(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        ids: list[str] = []
        threads = [
            threading.Thread(target=lambda: ids.append(upload(client, [chat_line("a")] * 200).id)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 4
        assert len(set(ids)) == 1
        assert len(in_folder(gateway)) == 1

    def test_it_expires_when_it_is_told_to(self, shared_client: openai.OpenAI) -> None:
        made = shared_client.files.create(
            file=("in.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert made.expires_at == made.created_at + 3600

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
            ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
                "expires_after.seconds",
            ),
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1e9"},
                "expires_after.seconds",
            ),
            ({"purpose": "fine-tune"}, "purpose"),
            ({}, "purpose"),
        ],
    )
    def test_a_wrong_field_is_named(self, shared_gateway: RunningGateway, fields: dict[str, str], param: str) -> None:
        with leaves(shared_gateway, files=0):
            answer = post(shared_gateway, fields=fields, file=("in.jsonl", LINES))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    def test_what_is_no_upload_is_refused_and_leaves_nothing(self, shared_gateway: RunningGateway) -> None:
        key = shared_gateway.key()
        before = in_folder(shared_gateway)
        for content_type, body, code in (
            ("application/json", b"{}", "unsupported_media_type"),
            ("multipart/form-data", b"", "unsupported_media_type"),
            ("multipart/form-data; boundary=x", b"no boundary here", "invalid_multipart"),
            ("multipart/form-data; boundary=x", b"--x\r\n", "invalid_multipart"),
            (
                "multipart/form-data; boundary=x",
                b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n--x',
                "invalid_multipart",
            ),
            (
                "multipart/form-data; boundary=x",
                b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n',
                "missing_required_parameter",
            ),
            (
                "multipart/form-data; boundary=x",
                b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"b" * 5000 + b"\r\n--x--\r\n",
                "string_above_max_length",
            ),
        ):
            answer = httpx.post(
                f"{shared_gateway.url}/v1/files",
                content=body,
                headers={"authorization": f"Bearer {key}", "content-type": content_type},
                trust_env=False,
            )
            assert answer.status_code in (400, 415), answer.text
            assert answer.json()["error"]["code"] == code
        assert in_folder(shared_gateway) == before

    def test_a_compressed_file_is_refused(self, shared_gateway: RunningGateway) -> None:
        """It may unpack to a thousand times its size."""
        with leaves(shared_gateway, files=0):
            answer = post(shared_gateway, fields={"purpose": "batch"}, file=("in.jsonl.gz", b"\x1f\x8b" + b"\0" * 50))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "compressed_file")

    def test_a_file_that_is_too_large_is_refused_with_and_without_its_length(
        self, shared_gateway: RunningGateway, make_gateway: MakeGateway
    ) -> None:
        small = make_gateway(changed(shared_gateway.settings, gateway={"max_upload_bytes": 200_000}))
        with leaves(small, files=1), small.client(max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                client.files.create(file=("in.jsonl", b"x" * 500_000), purpose="batch")
            assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
            assert client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch").bytes == 200_000

        def pieces() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(100):
                yield b"x" * 10_000

        with (
            leaves(small, files=0),
            contextlib.suppress(httpx.TransportError),
        ):  # it may be cut off before it has heard why
            answer = httpx.post(
                f"{small.url}/v1/files",
                content=pieces(),
                headers={"authorization": f"Bearer {small.key()}", "content-type": "multipart/form-data; boundary=x"},
                trust_env=False,
            )
            assert answer.status_code == 413

    def test_a_client_that_goes_away_leaves_nothing_behind(self, shared_gateway: RunningGateway) -> None:
        host, _, port = shared_gateway.url.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {shared_gateway.key()}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 100000\r\n\r\n"
            '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        with leaves(shared_gateway, files=0):
            before = len(in_folder(shared_gateway))
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + b"x" * 2000)
                wait_until(lambda: len(in_folder(shared_gateway)) > before, what="the beginning of the upload")

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ("../../etc/passwd", "passwd"),
            ("..\\..\\windows\\system.ini", "system.ini"),
            ("/", "upload"),
            ("..", "upload"),
            ("", "upload"),
            ('a"b\r\nX-Evil: 1.jsonl', 'a"b__X-Evil: 1.jsonl'),
            ("ü" * 300, "ü" * MAX_FILENAME_CHARACTERS),
            ("naïve \u202e.jsonl", "naïve _.jsonl"),
        ],
    )
    def test_a_filename_is_only_ever_shown(self, given: str, shown: str) -> None:
        assert shown_filename(given) == shown

    def test_a_malicious_filename_ends_up_nowhere(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        made = client.files.create(file=("../../e=vil;.jsonl", LINES), purpose="batch")
        assert made.filename == "e=vil;.jsonl"
        assert all(name.startswith("upload-") for name in in_folder(gateway))
        answer = client.files.with_raw_response.content(made.id)
        assert answer.headers["content-disposition"] == "attachment; filename*=utf-8''e%3Dvil%3B.jsonl"


class TestContent:
    def test_a_range_of_it_can_be_had(self, shared_gateway: RunningGateway, shared_client: openai.OpenAI) -> None:
        made = upload(shared_client, [chat_line("a")])
        answer = shared_client.files.with_raw_response.content(made.id, extra_headers={"range": "bytes=2-5"})
        assert answer.http_response.status_code == 206
        assert answer.http_response.content == jsonl([chat_line("a")])[2:6]

    def test_contents_that_go_while_they_are_asked_for_are_not_found(self, tmp_path: Path) -> None:
        """Between the look at the file and its opening somebody may delete it: that is no failure of ours."""
        path = tmp_path / "kept"
        path.write_bytes(LINES)
        missing = ApiError(404, "it is gone", code="file_content_missing")
        answer = StoredFile(path, missing, stat_result=path.stat())
        path.unlink()
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("nothing is read")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "headers": [], "asgi": {"version": "3.0", "spec_version": "2.4"}}
        asyncio.run(answer(scope, receive, send))
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert sent[0]["status"] == 404
        assert json.loads(sent[1]["body"])["error"]["code"] == "file_content_missing"

    def test_contents_that_are_gone_are_said_to_be(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI
    ) -> None:
        before = in_folder(shared_gateway)
        made = upload(shared_client, [chat_line("a")])
        (name,) = set(in_folder(shared_gateway)) - set(before)
        (shared_gateway.settings.files_dir / name).unlink()
        with pytest.raises(openai.NotFoundError) as caught:
            shared_client.files.content(made.id)
        assert caught.value.code == "file_content_missing"


class TestListAndDelete:
    def test_pages_go_on_behind_the_last_id(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        made = [upload(client, [chat_line(f"r{number}")]).id for number in range(5)]
        page = client.files.list(limit=2).to_dict()
        assert page["has_more"] is True
        assert (page["first_id"], page["last_id"]) == (made[4], made[3])
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made
        assert [file.id for file in client.files.list(limit=2, after=made[1])] == [made[0]]
        assert client.files.list(purpose="batch_output").data == []
        assert client.files.list(purpose="assistants").data == []
        with gateway.client("another") as another:
            empty = another.files.list()
            assert empty.data == []
            assert empty.to_dict()["first_id"] is None

    @pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "after=file-none", "after=%00"])
    def test_a_wrong_page_is_refused(self, gateway: RunningGateway, client: openai.OpenAI, query: str) -> None:
        name, _, value = query.partition("=")
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            client.get(f"/files?{name}={value}", cast_to=object)

    def test_a_deleted_file_is_gone(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        made = upload(client, [chat_line("a")])
        assert client.files.delete(made.id).to_dict() == {"id": made.id, "object": "file", "deleted": True}
        assert in_folder(gateway) == []
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(made.id)
            assert caught.value.code == "file_not_found"


class TestSweep:
    def add(self, database: Database, folder: Path, *, expires_at: float | None) -> files.NewUpload:
        contents = files.IncomingFile(folder)
        contents.write(os.urandom(20))
        contents.put_in_place()
        new = files.NewUpload(
            public_id=files.make_file_id(),
            tenant="default",
            purpose=FilePurpose.BATCH,
            filename="in.jsonl",
            path=contents.path,
            bytes=contents.bytes,
            lines=contents.lines,
            sha256=contents.sha256,
            expires_at=expires_at,
        )
        with database.write() as connection:
            files.add_upload(connection, new, 1000.0, same_within_s=60.0)
        return new

    def test_what_has_expired_goes_and_the_rest_stays(self, database: Database, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        expired = self.add(database, folder, expires_at=2000.0)
        later = self.add(database, folder, expires_at=2001.0)
        never = self.add(database, folder, expires_at=None)
        assert files.sweep_files(database, folder, now=2000.5) == 1
        assert {path.name for path in folder.iterdir()} == {later.path, never.path}
        with database.read() as connection:
            assert files.find_upload(connection, "default", expired.public_id) is None
            assert files.find_upload(connection, "default", later.public_id) is not None
        assert files.sweep_files(database, folder, now=2000.5) == 0

    def test_what_a_killed_gateway_left_behind_goes_after_an_hour(self, database: Database, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        kept = self.add(database, folder, expires_at=None)
        fresh = files.IncomingFile(folder)
        fresh.write(b"still coming")
        old = time.time() - files.LEFT_BEHIND_S - 1
        for name in ("upload-0123.jsonl", ".upload-4567.part", "batch_1-2.jsonl"):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (old, old))
        os.utime(folder / kept.path, (old, old))
        assert files.sweep_files(database, folder, now=5000.0) == 2
        left = {path.name for path in folder.iterdir()}
        assert kept.path in left
        assert "batch_1-2.jsonl" in left
        assert "upload-0123.jsonl" not in left
        assert len(left) == 3
        fresh.discard()


def test_a_large_upload_takes_little_memory(shared_gateway: RunningGateway, tmp_path: Path) -> None:
    """20 MB here; the drill does it with 200."""
    upload_and_measure(shared_gateway, tmp_path, megabytes=20, bound_bytes=200_000_000)


@pytest.mark.drill
def test_an_upload_of_200_mb_stays_below_200_mb_of_memory(shared_gateway: RunningGateway, tmp_path: Path) -> None:
    upload_and_measure(shared_gateway, tmp_path, megabytes=199, bound_bytes=200_000_000)


@pytest.mark.drill
def test_a_gateway_killed_in_mid_upload_leaves_no_file_that_anybody_sees(
    shared_gateway: RunningGateway, tenant: str
) -> None:
    """SIGKILL: what had come lies in the folder under a name that the sweep knows, and there is no row."""
    key = shared_gateway.key(tenant)
    before = set(in_folder(shared_gateway))
    with gateway_process(shared_gateway.settings) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 90000000\r\n\r\n"
            '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"x" * 5_000_000)
            wait_until(lambda: set(in_folder(shared_gateway)) > before, what="the beginning of the upload")
            os.kill(listening_pid(url), signal.SIGKILL)
    (left,) = set(in_folder(shared_gateway)) - before
    path = shared_gateway.settings.files_dir / left
    with shared_gateway.client(tenant) as client:
        assert client.files.list().data == []
    files.sweep_files(shared_gateway.database, path.parent, shared_gateway.database.now())
    assert path.exists(), "it might be an upload that goes on"
    old = time.time() - files.LEFT_BEHIND_S - 1
    os.utime(path, (old, old))
    files.sweep_files(shared_gateway.database, path.parent, shared_gateway.database.now())
    assert not path.exists()


def upload_and_measure(gateway: RunningGateway, folder: Path, *, megabytes: int, bound_bytes: int) -> None:
    """Upload to a gateway process of its own, and read from the kernel how large it ever was."""
    path = folder / "large.jsonl"
    line = jsonl([chat_line("x", "words " * 1000)])
    with path.open("wb") as file:
        for _ in range(megabytes * 1_000_000 // len(line)):
            file.write(line)
    with (
        gateway_process(gateway.settings) as url,
        path.open("rb") as file,
        openai.OpenAI(base_url=f"{url}/v1", api_key=gateway.key()) as client,
    ):
        made = client.files.create(file=("large.jsonl", file), purpose="batch")
        assert made.bytes == path.stat().st_size
        with client.files.with_streaming_response.content(made.id) as answer:
            assert sum(len(piece) for piece in answer.iter_bytes()) == made.bytes
        assert peak_bytes(url) < bound_bytes


def listening_pid(url: str) -> int:
    """The process that listens there."""
    port = int(url.rpartition(":")[2])
    (pid,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None
    }
    return pid


def peak_bytes(url: str) -> int:
    """The largest resident set that the process which listens there has had."""
    status = Path(f"/proc/{listening_pid(url)}/status").read_text()
    (peak,) = (row.split()[1] for row in status.splitlines() if row.startswith("VmHWM"))
    return int(peak) * 1024
