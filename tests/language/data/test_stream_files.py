"""Files of documents, each kind: what is read, from which document on, every refusal, and how much memory it takes."""

import codecs
import gzip
import os
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import requests
from documents import ENDINGS, write_documents
from google.api_core.exceptions import ServiceUnavailable
from google.cloud.storage import Blob
from mutations import at_most, mutated, refusals
from processes import ROOT

from language.data import stream_files
from language.data.stream_files import StreamFile, list_files, read_documents
from tpu_utils.base.errors import InputError, PassingError


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd}
TEXTS = [f"{number}: h\u00e9llo\n\u2028{'y' * number}" for number in range(40)]


def read(path, first=0, field="text") -> list:
    return list(read_documents(StreamFile(str(path), path.stat().st_size), field, first))


@pytest.mark.parametrize("ending", ENDINGS)
def test_documents_come_from_any_one_on(tmp_path, ending):
    path = write_documents(tmp_path / f"a.{ending}", TEXTS)
    for first in (0, 1, 6, 7, 8, 39, 40, 99):
        assert read(path, first) == TEXTS[first:]


def test_row_groups_before_the_first_document_are_not_read(tmp_path):
    path = write_documents(tmp_path / "a.parquet", TEXTS)
    content = bytearray(path.read_bytes())
    begins = pyarrow.parquet.read_metadata(path).row_group(0).column(1).dictionary_page_offset
    content[begins : begins + 36] = b"\xff" * 36
    path.write_bytes(content)
    for first in (28, 30):  # the first document of a row group, and one within it
        assert read(path, first) == TEXTS[first:]
    with pytest.raises(InputError, match="damaged behind document 0"):
        read(path)


def test_other_forms_of_the_same(tmp_path):
    """Concatenated gzip and zstd, blank lines, no newline at the end, a byte order mark, strings of all kinds, a column
    that stands there twice and is not asked for; frames as pzstd writes them."""
    line = b'{"text": "a"}\n'
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(line) + gzip.compress(b"\n" + line))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(line) * 2)
    (tmp_path / "a.ndjson").write_bytes(b"  \n" + line + b"\r\n" + line[:-1])
    few = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    for name, kind in dict(large=pyarrow.large_string(), view=pyarrow.string_view(), few=few).items():
        table = pyarrow.table({"text": pyarrow.array(["a", "a"]).cast(kind)})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    columns = [pyarrow.array(["a", "a"]), pyarrow.array([1, 2]), pyarrow.array(["b", "b"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, ["text", "id", "id"]), tmp_path / "twice.parquet")
    for name, packed in PACKED.items():
        (tmp_path / f"bom.json{name}").write_bytes(packed(codecs.BOM_UTF8 + line * 2))
    frame = zstd(line)
    skipped = b"\x2a\x4d\x18\4\0\0\0" + len(frame).to_bytes(4, "little")
    (tmp_path / "pzstd.jsonl.zst").write_bytes(b"\x50" + skipped + frame + b"\x5f" + skipped + frame)
    for path in tmp_path.iterdir():
        assert read(path) == ["a", "a"], path


@pytest.mark.parametrize(
    "line, said",
    [
        (b"{", "line 2 is no JSON"),
        (b'{"text": "a", "text": "b"}', "a key stands twice"),
        (b'{"body": "a", "id": 7}', "line 2 has body: str, id: int; expected an object with text: str; name another"),
        (b"{}", "line 2 has nothing; expected"),
        (b"7", "line 2 has int; expected an object"),
        (b'{"text": null}', "line 2 has no text (null)"),
        (b'{"text": "\\ud800"}', "line 2 has half a surrogate pair"),
        (None, "row 2 (row group 2) has no text (null)"),
    ],
)
def test_what_is_no_document_is_named_and_passed_over(tmp_path, line, said):
    """A line, or a row of parquet."""
    path = tmp_path / ("a.jsonl" if line else "a.parquet")
    if line:
        path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    else:
        write_documents(path, ["a", None, "b"], row_group=1)
    first, damaged, last = read(path)
    assert (first, last) == ("a", "b") and isinstance(damaged, InputError) and said in str(damaged)
    assert str(damaged).startswith(str(path))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_truncated_file_gives_what_is_whole_and_a_message(tmp_path, ending):
    path = write_documents(tmp_path / f"a.{ending}", TEXTS * 50)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)
    documents, found = read_documents(StreamFile(str(path), path.stat().st_size), "text"), []
    said = r"ends without the footer of parquet|damaged behind document|line \d+ is no JSON"
    with pytest.raises(InputError, match=rf"a\.{ending}: ({said}).*--stream_damaged skip"):
        for text in documents:
            if isinstance(text, InputError):
                raise text
            found.append(text)
    assert found == (TEXTS * 50)[: len(found)] and (found or ending in ("parquet", "jsonl.zst"))


LINE, PAGE = b'{"text": "a"}\n', b"<!DOCTYPE html><html>not found</html>" * 10
OTHER_FORMS = [
    ('{"text": "a"}'.encode("utf-16"), "is UTF-16; expected one JSON object a line; iconv --from-code UTF-16"),
    (b' \n[\n{"text": "a"}\n]', "is one JSON array; expected one JSON object a line; jq --compact-output '.[]' FILE"),
    (codecs.BOM_UTF8 + b'[{"text": "' + b"a" * (1 << 24), "is one JSON array"),
    (b'{ \r\n "text": "a"}', "has objects of several lines; expected one JSON object a line; jq"),
]


@pytest.mark.parametrize(
    "ending, content, said",
    [
        *((ending, content, "begins with no|is no JSON") for ending in ENDINGS for content in (b"", PAGE)),
        # as a download leaves it that has unpacked a file on its way, or has not
        *((f"jsonl{name}", b"PAR1", r": begins as \.parquet does; .*; rename it") for name in PACKED),
        ("parquet", gzip.compress(LINE, mtime=0), r": begins as \.gz does; .*; rename it"),
        ("jsonl", zstd(LINE), r": begins as \.zst does; .*; rename it"),
        *((f"json{name}", PACKED[name](content), re.escape(said)) for name in PACKED for content, said in OTHER_FORMS),
    ],
    ids=range(25),
)
def test_what_is_of_another_kind_is_refused(tmp_path, ending, content, said):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.{ending}.*({said})"):
        for text in read_documents(StreamFile(str(path), len(content)), "text"):
            raise text


STRINGS, NUMBERS = pyarrow.string(), pyarrow.int64()


@pytest.mark.parametrize(
    "columns, said",
    [
        ([("body", STRINGS)], "body: string; expected text: string;"),
        ([("text", NUMBERS)], "text: int64; expected text: string;"),
        ([("text", pyarrow.list_(STRINGS))], "text: list<element: string>; expected text: string;"),
        ([("a", pyarrow.struct([("text", STRINGS)]))], "a: struct<text: string>; expected text: string;"),
        ([("text", STRINGS), ("id", NUMBERS), ("text", STRINGS)], "text: string; expected text: string, once;"),
    ],
    ids=str,
)
def test_another_schema_is_named(tmp_path, columns, said):
    """Lists of texts were each "no text (null)", and of two columns one was read."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.schema(columns).empty_table(), path)
    with pytest.raises(InputError, match=re.escape(said) + " name another --text_field"):
        read(path)


def test_a_window_that_is_too_large_is_named(tmp_path):
    """As zstd --long=31 writes it where it does not know how long the text is."""
    line, path = b'{"text": "a"}\n', tmp_path / "a.jsonl.zst"
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    for exponent in (17, 18):
        path.write_bytes(b"\x28\xb5\x2f\xfd\0" + bytes([exponent << 3]) + block)
        if exponent == 17:
            assert read(path) == ["a"]
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: its zstd window is larger than 128 MiB, .* --long=27"):
        read(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, ending):
    """Also where its last line is half written: that is no damage, and the message says what it is."""
    path = write_documents(tmp_path / f"a.{ending}", TEXTS)
    file = StreamFile(str(path), path.stat().st_size)
    documents = read_documents(file, "text")
    assert next(documents) == TEXTS[0]
    with path.open("ab") as grown:
        grown.write(b'{"text": "half')
    with pytest.raises(InputError, match=r"bytes now, [\d,]+ when the run began: it is being written"):
        for text in documents:
            if isinstance(text, InputError):
                documents.close()
    with pytest.raises(InputError, match="it is being written"):
        list(read_documents(file, "text"))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_line_without_end_takes_no_memory(tmp_path, ending):
    """Gzip and zstd of a gigabyte are a megabyte or less: nothing is read beyond the longest document."""
    path, block = tmp_path / f"a.{ending}", b'{"text": "' + b"x" * (1 << 20)
    if ending == "jsonl":
        path.write_bytes(block)
        os.truncate(path, 1 << 30)
    else:
        with gzip.open(path, "wb", 1) if ending == "jsonl.gz" else pyarrow.CompressedOutputStream(path, "zstd") as file:
            for _ in range(256):
                file.write(block)
    before = pyarrow.total_allocated_bytes()
    with at_most(4 * stream_files.LONGEST), pytest.raises(InputError, match="line 1 has more than 16,777,216 bytes"):
        read(path)
    assert pyarrow.total_allocated_bytes() - before < stream_files.LONGEST


def test_a_footer_that_claims_too_much_is_not_read(tmp_path):
    path = write_documents(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-8] + (1 << 31).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(InputError, match="ends without the footer of parquet"):
        read(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path, ending):
    path = write_documents(tmp_path / f"a.{ending}", TEXTS)

    def read_all():
        assert all(isinstance(text, str | InputError) for text in read(path))

    refusals(path, mutated(path.read_bytes(), 120), read_all)


@pytest.fixture
def names(tmp_path):
    """names(text): the files that it names of a folder with three, or that list.txt names whose content is given."""
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl.zst"):
        write_documents(tmp_path / name, TEXTS)

    def names(text: str, listed: bytes = b"") -> list[str]:
        (tmp_path / "list.txt").write_bytes(listed)
        return [os.path.relpath(file.name, tmp_path) for file in list_files(text, str(tmp_path))]

    return names


def test_files_are_named_by_pattern_folder_or_list(names):
    assert names("*.[jp]*") == ["a.parquet", "b.jsonl"] and names("b.jsonl") == ["b.jsonl"]
    assert names("list.txt", b"# first\nsub/*.zst\n\n  b.jsonl\n") == ["sub/c.jsonl.zst", "b.jsonl"]
    assert names("list.txt", codecs.BOM_UTF8 + b"sub/*.zst\r\nb.jsonl\r\n") == ["sub/c.jsonl.zst", "b.jsonl"]
    assert names("sub") == ["sub/c.jsonl.zst"]


@pytest.mark.parametrize(
    "listed, said",
    [
        (b"*.jsonl\nb.jsonl\n", "names 1 files twice"),
        (b"b.jsonl\nsub/../b.jsonl\n", "names 1 files twice"),
        (b"list.txt\n", r"names list\.txt; expected documents: \.parquet"),
        (b"# nothing\n", "names no file"),
        (b"none.jsonl\n", r"none\.jsonl: matches no file"),
        (b"*.*", r"list\.txt: expected documents: .* name a pattern"),
    ],
)
def test_a_list_that_leads_nowhere_is_refused(names, listed, said):
    with pytest.raises(InputError, match=said):
        names("list.txt", listed)


def test_hidden_files_are_left_out_and_counted(tmp_path, capsys):
    """Unless the user names them."""
    folder = tmp_path / "c"
    for name in ("a.jsonl", ".cache/huggingface/download/a.jsonl", "._b.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_documents(folder / name, [name])
    for names, count in (("c", 2), ("c/*.jsonl", 1)):
        assert [file.name for file in list_files(names, str(tmp_path))] == [str(folder / "a.jsonl")]
        assert capsys.readouterr().err == f"left out   {count} hidden files in {folder}\n"
    list_files("c", str(tmp_path))
    assert not capsys.readouterr().err, "said once"
    assert len(list_files("c/.cache/huggingface/download/*.jsonl", str(tmp_path))) == 1


# --------------------------------------------------------------------------------------------------------- in a bucket
@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """gs://runs of the emulator, with a file of each kind."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "bucket_emulator.py"], stdout=subprocess.PIPE, text=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{int(process.stdout.readline())}")
        from google.cloud import storage

        found = storage.Client(project="unused").bucket("runs")
        for ending in ENDINGS:
            path = write_documents(tmp_path_factory.mktemp("local") / f"a.{ending}", TEXTS)
            found.blob(f"corpus/sub/{path.name}").upload_from_filename(path)
        found.blob("corpus/notes.md").upload_from_string("notes")
        yield found
    process.kill()


def test_objects_are_read_as_files_are(bucket, monkeypatch):
    monkeypatch.setattr(stream_files, "BLOCK", 100)  # many requests for a file
    files = list_files("gs://runs/corpus/sub/*", "elsewhere")
    assert [file.name.rpartition("/")[2] for file in files] == sorted(f"a.{ending}" for ending in ENDINGS)
    for file in files:
        assert list(read_documents(file, "text", 9)) == TEXTS[9:], file.name
    assert list_files("gs://runs/corpus/sub", "") == files == list_files("gs://runs/corpus/s*/a.*", "")
    assert len({file.fingerprint() for file in files}) == 4


def test_hidden_objects_are_left_out_and_counted(bucket, capsys):
    for name in ("folder/.cache/a.jsonl", "folder/.a.jsonl", "folder/a.jsonl", ".b/a.jsonl"):
        bucket.blob(f"with_hidden/{name}").upload_from_string('{"text": "a"}')
    root = "gs://runs/with_hidden"
    for names, count, hidden in (
        ("folder", 1, 2),
        ("folder/*.jsonl", 1, 1),
        ("folder/a*", 1, 0),
        ("folder/a.jsonl", 1, 0),
        (".b", 1, 0),
        ("fold*/*.jsonl", 1, 1),
    ):
        assert len(list_files(f"{root}/{names}", "")) == count
        told = f"left out   {hidden} hidden objects of {root}/{names}\n" if hidden else ""
        assert capsys.readouterr().err == told


@pytest.mark.parametrize("error", [ServiceUnavailable("no answer"), requests.ConnectionError("no answer")])
def test_a_bucket_that_does_not_answer_is_no_damage(bucket, monkeypatch, error):
    """A PassingError, which --stream_damaged skip does not leave out: also through gzip and pyarrow, which read."""
    monkeypatch.setattr(stream_files, "BLOCK", 100)
    download, asked = Blob.download_as_bytes, []

    def failing(self, start, **more):
        asked.append(start)
        if start > 100:
            raise error
        return download(self, start=start, **more)

    monkeypatch.setattr(Blob, "download_as_bytes", failing)
    for file in list_files("gs://runs/corpus/sub/*", ""):
        with pytest.raises(PassingError, match=r"cannot be read as it was when the run began: .*no answer"):
            list(read_documents(file, "text"))
    assert len(asked) >= 8, "some were answered"


def test_an_object_that_was_replaced_or_is_not_there_is_refused(bucket):
    bucket.blob("changing.jsonl").upload_from_string('{"text": "a"}\n')
    (file,) = list_files("gs://runs/changing.jsonl", "")
    bucket.blob("changing.jsonl").upload_from_string('{"text": "b"}\n')
    with pytest.raises(InputError, match=r"gs://runs/changing\.jsonl cannot be read as it was when the run began"):
        list(read_documents(file, "text"))
    for url, said in (
        ("gs://runs/none/*", "matches no object"),
        ("gs://nobody/x", "bucket nobody does not exist"),
        ("gs://forbidden/x", "may not list"),
        ("gs://runs/corpus/*.md", r"notes\.md: expected documents"),
    ):
        with pytest.raises((InputError, PassingError), match=said):
            list_files(url, "")


@pytest.mark.parametrize("ending", PACKED)
def test_lines_keep_their_numbers_behind_many_blank_ones(tmp_path, ending):
    """A few hundred bytes of zstd are millions, which are passed in blocks."""
    content = b'{"text": "a"}\n' + b"\n" * 300_000 + b' \t\r\n{"text": "b"}\n' + b"\n" * 100 + b"{\n" + b"\n" * 70
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(PACKED[ending](content))
    first, second, damaged = read(path)
    assert (first, second) == ("a", "b") and "line 300104 is no JSON" in str(damaged)


@pytest.mark.parametrize("kind", ["few", "text"])
def test_a_value_that_many_rows_share_is_in_memory_a_few_times(tmp_path, kind, monkeypatch):
    """3,478 bytes once took 11 GB: 64 rows of one value of a dictionary."""
    monkeypatch.setattr(stream_files, "LONGEST", 1 << 16)
    monkeypatch.setattr(stream_files, "BATCH_BYTES", 1 << 18)
    texts = pyarrow.array(["a" * (1 << 20), "b"])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1] * 40, pyarrow.int32()), texts)
    column = column if kind == "few" else column.dictionary_decode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=60)
    pool = pyarrow.proxy_memory_pool(own := pyarrow.default_memory_pool())
    pyarrow.set_memory_pool(pool)
    try:
        found = read(tmp_path / "a.parquet")
    finally:
        pyarrow.set_memory_pool(own)
    assert [text for text in found if isinstance(text, str)] == ["b"] * 40
    assert 0 < pool.max_memory() < 10 << 20, "of 40 MB"
    assert "row 79 (row group 2) has 1,048,576 bytes; expected 65,536" in str(found[78])


def test_rows_that_are_too_long_are_named_and_passed_over(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.parquet", ["a", "b" * 5000, "c", "d"], row_group=1)
    monkeypatch.setattr(stream_files, "LONGEST", 1000)
    first, long, *last = read(path)
    assert (first, last) == ("a", ["c", "d"]) and "row 2 (row group 2) has 5,0" in str(long)
    assert read(path, 2) == ["c", "d"]
