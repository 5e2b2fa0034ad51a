// Tests of the files and pipes that streams read, and of errors in them.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/data/stream.h"
#include "gzip.h"
#include "streams.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
using namespace std::string_literals;

namespace {

// Returns options for a pipe, whose words cannot be collected from it.
StreamOptions options_of_pipe(const std::string& path, const std::string& text) {
  StreamOptions options;
  options.paths = {path};
  options.vocabulary = parse_fast_text(text, "f").vocabulary;
  options.batch_size = 4;
  options.shuffle_buffer = 8;
  return options;
}

std::string failure_of(const StreamOptions& options) {
  return bad_data([&] { read_epoch(options); });
}

std::string fifo(const Folder& folder) {
  const std::string path = folder.path("fifo");
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  return path;
}

}  // namespace

TEST_CASE("Patterns of paths are expanded in their order") {
  const Folder folder;
  for (const char* name : {"b2", "b10", "B1", "a", "c[1]"}) folder.write(name, "x\n");
  const auto in_folder = [&](Strings names) {
    for (std::string& name : names) name = folder.path(name);
    return names;
  };
  CHECK(expand_paths(in_folder({"b*", "a", "B?", "c[1]"})) ==
        in_folder({"b10", "b2", "a", "B1", "c[1]"}));
  CHECK(expand_paths({"-"}) == Strings{"-"});
  CHECK(bad_data([&] { expand_paths(in_folder({"z*"})); }) ==
        folder.path("z*") + ": no file matches this pattern");
  CHECK(bad_data([&] { expand_paths(in_folder({"z"})); }) ==
        "cannot open " + folder.path("z") + ": No such file or directory");
  CHECK(bad_data([&] { expand_paths({folder.path()}); }) ==
        folder.path() + ": a folder; give its files, for example as " + folder.path() + "/*");
  const std::string empty = folder.write("b3", "");
  CHECK(bad_data([&] { expand_paths(in_folder({"a", "b*"})); }) == empty + ": an empty file");
}

TEST_CASE("A stream refuses files that it cannot read before it reads") {
  const Folder folder;
  const std::string good = folder.write("good", numbered(0, 5));
  StreamOptions options = options_of({good});
  const auto refuse = [&](const std::string& path) {
    options.paths = {good, path};
    return bad_data([&] { Stream stream(options); });
  };
  CHECK(refuse(folder.path("missing")) ==
        "cannot open " + folder.path("missing") + ": No such file or directory");
  CHECK(refuse(folder.path()).starts_with(folder.path() + ": a folder"));
  CHECK(refuse(folder.write("empty", "")) == folder.path("empty") + ": an empty file");
  CHECK(
      refuse(folder.write("utf16", "\xFF\xFEw\0"s)).starts_with(folder.path("utf16") + ": UTF-16"));
  CHECK(refuse(folder.write("zero", "w\0"s)) ==
        folder.path("zero") + ": a binary file, not text: byte 2 is zero");
  options.paths = {good, folder.write("zero.gz", gzip("w\0"s))};
  CHECK(failure_of(options) ==
        folder.path("zero.gz") + ": a binary file, not text: byte 2 is zero");
}

TEST_CASE("A damaged gzip file is an error after the blocks before it") {
  const Folder folder;
  std::string bytes = gzip(numbered(0, 5000));
  const std::string good = folder.write("good", numbered(0, 5000));
  StreamOptions options = options_of({good}, 4, 8);
  options.paths = {folder.write("cut.gz", bytes.substr(0, bytes.size() / 2))};
  Stream stream(options);
  stream.begin({});
  int64_t batches = 0;
  CHECK(bad_data([&] {
          for (; stream.ready() > 0; ++batches) stream.next();
        }) == folder.path("cut.gz") + ": the gzip file is cut short");
  CHECK(batches % 2 == 0);
  CHECK(batches > 100);
  CHECK(bad_data([&] { stream.next(); }) == folder.path("cut.gz") + ": the gzip file is cut short");
  bytes[bytes.size() - 8] ^= 1;
  options.paths = {folder.write("damaged.gz", bytes)};
  CHECK(failure_of(options) == folder.path("damaged.gz") + ": the gzip file is damaged");
}

TEST_CASE("A file whose size changes is an error") {
  const Folder folder;
  const std::string text = numbered(0, 100), size = std::to_string(text.size());
  const std::string path = folder.write("file", text);
  StreamOptions options = options_of({path});
  options.shards = GENERATE(1, 2);
  options.shard = options.shards - 1;
  Stream stream(options);
  stream.begin({});
  while (stream.ready() > 0) stream.next();
  const auto message = [&](size_t now) {
    return path + ": changed while it was read: it had " + size + " bytes and now has " +
           std::to_string(now);
  };
  std::ofstream(path, std::ios::app) << "__label__a more\n";
  stream.begin({.epoch = 2});
  CHECK(bad_data([&] { stream.ready(); }) == message(text.size() + 16));
  std::filesystem::resize_file(path, 10);
  stream.begin({.epoch = 3});
  CHECK(bad_data([&] { stream.ready(); }) == message(10));
}

TEST_CASE("A file that grows while it is read is an error") {
  const Folder folder;
  const std::string path = folder.write("file", numbered(0, 100'000) + "__label__a last");
  Stream stream(options_of({path}, 4, 8));
  stream.begin({});
  stream.next();  // the thread has read less than a half of the file
  std::ofstream(path, std::ios::app) << " __label__b x\n";  // makes the last line a bad row
  CHECK(bad_data([&] {
          while (stream.ready() > 0) stream.next();
        }).starts_with(path + ": changed while it was read: it had "));
}

TEST_CASE("Files without any example are an error") {
  const Folder folder;
  const std::string good = folder.write("good", numbered(0, 9));
  StreamOptions options = options_of({good});
  options.paths = {folder.write("blank", "\n \r\n\n\n")};
  options.shards = GENERATE(1, 2);
  CHECK(failure_of(options) == folder.path("blank") + ": no example");
  options.paths.push_back(folder.write("bad", "\n\nno label\nnone here\n"));
  options.bad_rows = BadRows::kSkip;
  CHECK(failure_of(options) ==
        "2 files, the first is " + folder.path("blank") + ": no example; the first bad row is " +
            folder.path("bad") + ":3:1: no __label__NAME in the line that begins with 'no label'");
}

TEST_CASE("A line of more than 64 MiB is an error") {
  const Folder folder;
  std::string text;
  const std::string zeros = gzip(std::string(1 << 20, 'x'));
  for (int i = 0; i < 65; ++i) text += zeros;
  const std::string path = folder.write("long.gz", text);
  CHECK(bad_data([&] { scan_vocabulary({path}, Format::kFastText, 0); }) ==
        path + ": a line is longer than 64 MiB");
}

TEST_CASE("A named pipe is read as a file") {
  const Folder folder;
  const std::string path = fifo(folder), text = numbered(0, 50);
  const bool compressed = GENERATE(false, true);
  StreamOptions options = options_of_pipe(path, text);
  Stream stream(options);
  for (const int64_t epoch : {1, 2}) {  // a writer for each epoch
    std::thread writer(
        [&] { std::ofstream(path, std::ios::binary) << (compressed ? gzip(text) : text); });
    stream.begin({.epoch = epoch});
    CHECK(sorted(read_rest(stream).examples) == sorted(in_memory(text, options)));
    writer.join();
  }
  options.shards = 2;
  CHECK(bad_data([&] { Stream other(options); }) ==
        path + ": a pipe can be read by one process only: give files, or --data-from rank0");
  CHECK(bad_data([&] { detect_format(path); }).starts_with(path + ": the format of a pipe"));
  CHECK(bad_data([&] {
          scan_vocabulary({path}, Format::kFastText, 0);
        }).starts_with(path + ": a pipe can be read only once"));
}

TEST_CASE("A named pipe without a writer is an error") {
  const Folder folder;
  StreamOptions options = options_of_pipe(fifo(folder), numbered(0, 9));
  options.pipe_writer_limit = std::chrono::milliseconds(1);
  CHECK(failure_of(options) == folder.path("fifo") + ": no process writes to this pipe");
}

TEST_CASE("A named pipe's writer may come later, and may write late") {
  const Folder folder;
  const std::string text = numbered(0, 9);
  StreamOptions options = options_of_pipe(fifo(folder), text);
  options.pipe_writer_limit = std::chrono::milliseconds(1);
  const std::string& path = options.paths[0];
  SECTION("a writer that has opened the pipe may write after the limit") {
    const int keeper = open(path.c_str(), O_RDWR);
    Stream stream(options);
    stream.begin({});
    std::this_thread::sleep_for(
        std::chrono::milliseconds(20));  // most likely, the limit has passed
    REQUIRE(write(keeper, text.data(), text.size()) == std::ssize(text));
    CHECK(stream.next().size() == 4);
    close(keeper);
    CHECK(read_rest(stream).examples.size() == 5);
  }
  SECTION("a writer that opens the pipe within the limit") {
    options.pipe_writer_limit = std::chrono::minutes(10);
    Stream stream(options);
    stream.begin({});
    std::thread writer([&] { std::ofstream(path, std::ios::binary) << text; });
    CHECK(read_rest(stream).examples.size() == 9);
    writer.join();
  }
}

TEST_CASE("A stream ends while it waits for a pipe") {
  const Folder folder;
  StreamOptions options = options_of_pipe(fifo(folder), numbered(0, 9));
  options.pipe_writer_limit = std::chrono::minutes(10);
  const int keeper = GENERATE(false, true) ? open(options.paths[0].c_str(), O_RDWR) : -1;
  {
    Stream stream(options);
    stream.begin({});
    stream.begin({});                                           // stops the reading, too
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // most likely, the thread waits
  }
  if (keeper >= 0) close(keeper);
}

TEST_CASE("The standard input is read once") {
  const Folder folder;
  const std::string text = numbered(0, 20);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const int before = dup(STDIN_FILENO);
  REQUIRE(dup2(ends[0], STDIN_FILENO) == STDIN_FILENO);
  close(ends[0]);
  REQUIRE(write(ends[1], text.data(), text.size()) == std::ssize(text));
  close(ends[1]);
  {
    StreamOptions options = options_of_pipe("-", text);
    Stream stream(options);
    stream.begin({});
    CHECK(sorted(read_rest(stream).examples) == sorted(in_memory(text, options)));
    CHECK(bad_data([&] { stream.begin({.epoch = 2}); }) ==
          "the standard input can be read only once: give a file, or one epoch");
    options.shards = 2;
    CHECK(bad_data([&] {
            Stream other(options);
          }).starts_with("the standard input can be read by one process only"));
  }
  if (before >= 0) {
    dup2(before, STDIN_FILENO);
    close(before);
  } else {
    close(STDIN_FILENO);
  }
}

}  // namespace distrain::data
