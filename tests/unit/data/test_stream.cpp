// Tests of the order of streams, their shards and positions.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "distrain/data/stream.h"
#include "distrain/store/hash.h"
#include "gzip.h"
#include "streams.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
using namespace std::string_literals;

namespace {

struct SourceTexts {
  Folder folder;
  Strings paths;
  std::string text;  // of all files

  void add(const std::string& bytes, bool compressed = false) {
    const std::string name = "file" + std::to_string(paths.size());
    paths.push_back(folder.write(name, compressed ? gzip(bytes) : bytes));
    text += bytes + (bytes.ends_with('\n') ? "" : "\n");
  }
};

}  // namespace

TEST_CASE("The shards of a stream have each example once") {
  SourceTexts files;
  SECTION("one plain file") { files.add(numbered(0, 101)); }
  SECTION("plain files without a last newline") {
    files.add(numbered(0, 1) + "__label__a last");
    files.add(numbered(1, 90));
    files.add("__label__b end");
    files.add("__label__b end");
  }
  SECTION("CRLF, empty lines and a byte order mark") {
    files.add("\xEF\xBB\xBF" + numbered(0, 30, "\r\n") + "\r\n\n  \n" + numbered(30, 60, "\r\n"));
  }
  SECTION("lines of equal length, so that cuts are at their boundaries") {
    std::string text;
    for (int i = 0; i < 60; ++i) text += "__label__a " + std::to_string(100 + i) + "\n";
    files.add(text);
  }
  SECTION("gzip files") {
    for (int i = 0; i < 7; ++i) files.add(numbered(40 * i, 40 * i + 5 * i + 1), true);
  }
  SECTION("plain and gzip files") {
    files.add(numbered(0, 20), true);
    files.add(numbered(20, 90));
    files.add(numbered(90, 100), true);
    files.add(numbered(100, 101));
  }
  StreamOptions options = options_of(files.paths);
  const std::vector<Ints> expected = in_memory(files.text, options);
  for (options.shards = 1; options.shards <= 5; ++options.shards) {
    std::vector<Ints> all;
    for (options.shard = 0; options.shard < options.shards; ++options.shard) {
      const Read read = read_epoch(options);
      all.insert(all.end(), read.examples.begin(), read.examples.end());
    }
    CHECK(sorted(all) == sorted(expected));
  }
  options.shard = 0;
  options.shards = 1;
  options.shuffle_buffer = 0;
  CHECK(read_epoch(options).examples == expected);
}

TEST_CASE("A line belongs to the shard that has its first byte, for every cut") {
  SourceTexts files;
  files.add("__label__a 1\n__label__a 22\r\n\n__label__a 333\n__label__a 4");
  const auto size = static_cast<int>(files.text.size()) - 1;
  StreamOptions options = options_of(files.paths);
  const std::vector<Ints> expected = in_memory(files.text, options);
  options.shards = size;  // a shard of each byte
  options.shuffle_buffer = 0;
  std::vector<Ints> all;
  for (options.shard = 0; options.shard < size; ++options.shard) {
    const std::vector<Ints> read = read_epoch(options).examples;
    all.insert(all.end(), read.begin(), read.end());
  }
  CHECK(all == expected);
}

TEST_CASE("A stream continues from each position") {
  SourceTexts files;
  files.add(numbered(0, 23));
  files.add(numbered(23, 60), true);
  files.add(numbered(60, 61));
  files.add(numbered(61, 99), true);
  StreamOptions options = options_of(files.paths);
  options.batch_size = GENERATE(1, 4, 8, 20);
  options.shuffle_buffer = GENERATE(0, 3, 8, 33, 1000);
  options.shards = GENERATE(1, 2);
  options.shard = options.shards - 1;
  const Read whole = read_epoch(options, 3);
  Stream stream(options);
  size_t used = 0;
  for (size_t k = 0; k < whole.positions.size(); ++k) {
    CAPTURE(options.batch_size, options.shuffle_buffer, options.shards, k);
    CHECK(whole.positions[k].epoch == 3);
    stream.begin(whole.positions[k]);
    CHECK(stream.position() == whole.positions[k]);
    const Read rest = read_rest(stream);
    CHECK(rest.examples ==
          std::vector(whole.examples.begin() + static_cast<int64_t>(used), whole.examples.end()));
    CHECK(std::ranges::equal(rest.positions, std::span(whole.positions).subspan(k)));
    if (k < whole.sizes.size()) used += static_cast<size_t>(whole.sizes[k]);
  }
  // The batch size may change.
  options.batch_size = 7;
  Stream other(options);
  other.begin(whole.positions[1]);
  CHECK(read_rest(other).examples ==
        std::vector(whole.examples.begin() + whole.sizes[0], whole.examples.end()));
}

TEST_CASE("A stream that reads on in the next epoch has the same order and positions") {
  SourceTexts files;
  files.add(numbered(0, 23));
  files.add(numbered(23, 60), true);
  StreamOptions options = options_of(files.paths);
  options.batch_size = GENERATE(1, 4, 20, 100);
  options.shuffle_buffer = GENERATE(0, 1, 8, 33, 60, 1000);
  options.epochs = GENERATE(2, 3, 9);
  CAPTURE(options.batch_size, options.shuffle_buffer, options.epochs);
  Stream stream(options);
  const auto check = [&](int64_t epoch) {
    StreamOptions one_epoch = options;
    one_epoch.epochs = 1;
    Stream other(one_epoch);
    other.begin({.epoch = epoch});
    const Read alone = read_rest(other);
    stream.begin({.epoch = epoch});
    CHECK(stream.position() == StreamPosition{.epoch = epoch});
    const Read read = read_rest(stream);
    CHECK(read.examples == alone.examples);
    CHECK(read.sizes == alone.sizes);
    CHECK(std::ranges::equal(read.positions, alone.positions));
    CHECK(stream.ready() == 0);
    CHECK(stream.position() == other.position());
  };
  for (int64_t epoch = 1; epoch <= 5; ++epoch) check(epoch);
  for (const int64_t epoch : {1, 3, 3, 2}) check(epoch);
  stream.begin({.epoch = 1});
  stream.next();
  check(2);
  const Read whole = read_epoch(options, 2);
  stream.begin(whole.positions[whole.positions.size() / 2]);
  stream.begin(whole.positions.back());  // the end of the epoch
  CHECK(stream.ready() == 0);
  check(3);
}

TEST_CASE("An error while a stream reads on belongs to the next epoch") {
  const Folder folder;
  const std::string path = folder.write("file", numbered(0, 100));
  StreamOptions options = options_of({path}, 4, 90);
  options.epochs = 2;
  Stream stream(options);
  stream.begin({});
  while (stream.position().used < 88) stream.next();
  stream.ready();  // the thread has read the second block, and waits until the first is used up
  std::ofstream(path, std::ios::app) << "__label__a more\n";
  while (stream.ready() > 0) stream.next();
  CHECK(stream.counts().examples == 100);
  CHECK(stream.ready() == 0);
  stream.begin({.epoch = 2});
  CHECK(error_of(base::ErrorKind::kBadData, [&] {
          stream.ready();
        }).starts_with(path + ": changed while it was read: "));
}

TEST_CASE("Batches are full but for the last of the epoch") {
  SourceTexts files;
  files.add(numbered(0, 50));
  CHECK(read_epoch(options_of(files.paths, 8, 12)).sizes == Ints{8, 8, 8, 8, 8, 8, 2});
  CHECK(read_epoch(options_of(files.paths, 25, 10)).sizes == Ints{25, 25});
  CHECK(read_epoch(options_of(files.paths, 100, 3)).sizes == Ints{50});
  Stream stream(options_of(files.paths, 10, 50));
  stream.begin({});
  for (const int64_t left : {5, 4, 3, 2, 1}) {
    CHECK(stream.ready() == left);
    CHECK(stream.next().size() == 10);
  }
  CHECK(stream.ready() == 0);
  CHECK(stream.ready() == 0);
  CHECK(error_of(base::ErrorKind::kInvalid, [&] { stream.next(); }) ==
        "the epoch has no further batch");
  CHECK(stream.counts().examples == 50);
}

TEST_CASE("The order depends on seed, epoch and shards") {
  SourceTexts files;
  files.add(numbered(0, 200));
  StreamOptions options = options_of(files.paths, 16, 64);
  const std::vector<Ints> first = read_epoch(options).examples;
  const std::vector<Ints> in_order = in_memory(files.text, options);
  CHECK(read_epoch(options).examples == first);
  CHECK(first != in_order);
  CHECK(read_epoch(options, 2).examples != first);
  // Examples stay in their block.
  const auto block = [](const std::vector<Ints>& examples) {
    return sorted({examples.begin() + 64, examples.begin() + 128});
  };
  CHECK(block(first) == block(in_order));
  options.seed = 2;
  CHECK(read_epoch(options).examples != first);
  // A batch size or a later begin() does not change the order.
  options.seed = 1;
  options.batch_size = 5;
  Stream stream(options);
  stream.begin({.epoch = 2});
  stream.next();
  stream.begin({.epoch = 1});
  CHECK(read_rest(stream).examples == first);
}

TEST_CASE("The order of blocks is the same in all versions") {
  SourceTexts files;
  std::string text;
  for (int i = 10; i < 30; ++i) text += "__label__a " + std::to_string(i) + "\n";
  files.add(text);
  StreamOptions options = options_of(files.paths, 4, 5);
  options.shards = 2;
  options.shard = 1;
  options.seed = 7;
  Ints tokens;
  for (const Ints& example : read_epoch(options, 3).examples) tokens.push_back(example.at(1));
  CHECK(tokens == Ints{10, 12, 14, 11, 13, 18, 19, 17, 15, 16});
}

TEST_CASE("Gzip files go to the shards by size") {
  SourceTexts files;
  std::vector<std::string> texts;
  const auto incompressible = [](int i, int words) {
    std::string text = "__label__a file" + std::to_string(i);
    for (int k = 0; k < words; ++k) {
      text += " " + std::to_string(store::content_hash(std::to_string(1000 * i + k)));
    }
    return text + "\n";
  };
  for (const int words : {10, 40, 20, 30}) {
    files.add(incompressible(static_cast<int>(files.paths.size()), words), true);
  }
  StreamOptions options = options_of(files.paths, 1, 0);
  options.shards = 2;
  const auto names = [&](int shard) {
    options.shard = shard;
    Strings found;
    for (const Ints& example : read_epoch(options).examples) {
      found.emplace_back(options.vocabulary->words.word(example.at(1)));
    }
    return found;
  };
  CHECK(names(0) == Strings{"file0", "file1"});  // 40 and 10 words
  CHECK(names(1) == Strings{"file2", "file3"});  // 30 and 20 words

  options.shards = 5;
  CHECK(bad_data([&] { Stream stream(options); }) ==
        "4 files are too few for 5 trainers, because a gzip file cannot be divided: give at least "
        "as many files as trainers, fewer --trainers, or --data-from rank0");
  options.paths.resize(1);
  options.shards = 2;
  CHECK(bad_data([&] { Stream stream(options); }).starts_with("1 file is too few for 2 trainers"));
}

TEST_CASE("A shard may have no example if another one has some") {
  SourceTexts files;
  files.add("__label__a one\n" + std::string(100, '\n'));
  StreamOptions options = options_of(files.paths);
  options.shards = 2;
  options.shard = 1;
  CHECK(read_epoch(options).examples.empty());
}

TEST_CASE("The content key depends on sizes and first bytes, not on names") {
  const Folder folder;
  const auto key = [&](const Strings& paths) {
    StreamOptions options;
    options.paths = paths;
    options.vocabulary = std::make_shared<const TextVocabulary>();
    return Stream(options).content_key();
  };
  const std::string a = folder.write("a", numbered(0, 5)), b = folder.write("b", numbered(5, 9));
  const std::string same = folder.write("same", numbered(0, 5));
  const std::string longer = folder.write("longer", numbered(0, 5) + " ");
  CHECK(key({a, b}) == key({same, b}));
  CHECK(key({a, b}) != key({b, a}));
  CHECK(key({a}) != key({a, a}));
  CHECK(key({a}) != key({longer}));
  std::string text = numbered(0, 5000);
  const auto large = key({folder.write("large", text)});
  CHECK(key({folder.write("large", text + "\n")}) != large);
  text[10'000] = 'X';
  CHECK(key({folder.write("large", text)}) != large);
}

TEST_CASE("Wrong options of a stream are refused") {
  SourceTexts files;
  files.add(numbered(0, 4));
  const StreamOptions right = options_of(files.paths);
  const auto refuse = [&](auto change) {
    StreamOptions options = right;
    change(options);
    return error_of(base::ErrorKind::kInvalid, [&] { Stream stream(options); });
  };
  CHECK(refuse([](auto& o) { o.shard = 1; }) == "the shard must be in [0, shards), not 1");
  CHECK(refuse([](auto& o) { o.shards = 0; }) == "the number of shards must be at least 1, not 0");
  CHECK(refuse([](auto& o) { o.batch_size = 0; }) == "the batch size must be at least 1, not 0");
  CHECK(refuse([](auto& o) { o.shuffle_buffer = -1; }).starts_with("the shuffle buffer must"));
  CHECK(refuse([](auto& o) { o.vocabulary = nullptr; }) == "a stream needs a vocabulary");
  CHECK(refuse([](auto& o) { o.format = Format::kCriteo; }) ==
        "Criteo data needs hash_bits above 0");
  CHECK(refuse([](auto& o) { o.paths.clear(); }) == "a stream needs at least one file, not 0");
  Stream stream(right);
  CHECK(error_of(base::ErrorKind::kInvalid, [&] { stream.ready(); }) ==
        "Stream::begin() was not called");
  for (const StreamPosition& position :
       {StreamPosition{.piece = 2}, StreamPosition{.offset = -1}, StreamPosition{.used = -1}}) {
    error_of(base::ErrorKind::kBadData, [&] { stream.begin(position); });
  }
  stream.begin({.used = 5});
  CHECK(bad_data([&] { stream.ready(); }) ==
        files.paths[0] +
            ": not the data of the checkpoint: a block has 4 examples, of which 5 were used");
}

}  // namespace distrain::data
