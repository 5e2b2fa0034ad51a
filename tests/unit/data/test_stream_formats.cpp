// Tests of the formats of streams, of bad rows and of vocabularies.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/data/stream.h"
#include "gzip.h"
#include "streams.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
using namespace std::string_literals;

namespace {

constexpr int kBits = 20;

// Returns a line of Criteo with this label, whose numbers and categories are empty but for some.
std::string criteo(const std::string& label, std::vector<std::string> numbers = {},
                   std::vector<std::string> categories = {}, const std::string& line_end = "\n") {
  numbers.resize(13);
  categories.resize(26);
  std::string line = label;
  for (const std::string& field : numbers) line += "\t" + field;
  for (const std::string& field : categories) line += "\t" + field;
  return line + line_end;
}

// Returns the same example in fastText's format, by the documented words.
std::string as_words(const std::string& label, std::vector<std::string> buckets = {},
                     std::vector<std::string> categories = {}) {
  buckets.resize(13);
  categories.resize(26);
  std::string line = "__label__" + label;
  for (size_t i = 0; i < 13; ++i) line += " I" + std::to_string(i + 1) + ":" + buckets[i];
  for (size_t i = 0; i < 26; ++i) line += " C" + std::to_string(i + 1) + ":" + categories[i];
  return line + "\n";
}

StreamOptions criteo_options(const std::string& path) {
  StreamOptions options;
  options.paths = {path};
  options.format = Format::kCriteo;
  options.vocabulary = std::make_shared<const TextVocabulary>(
      scan_vocabulary(options.paths, Format::kCriteo, kBits));
  options.shuffle_buffer = 0;
  return options;
}

std::string bad_line(const StreamOptions& options) {
  const std::string message = bad_data([&] { read_epoch(options); });
  CHECK(message.starts_with(options.paths[0] + ":"));
  return message.substr(std::min(message.size(), options.paths[0].size() + 1));
}

std::string random_text(uint64_t seed, int lines) {
  base::Random random({seed});
  std::string text;
  for (int i = 0; i < lines; ++i) {
    text += "__label__" + std::to_string(random.below(4));
    for (uint64_t left = random.below(20); left > 0; --left) {
      text += " w" + std::to_string(random.below(500));
    }
    text += random.below(9) == 0 ? "\r\n\n" : "\n";
  }
  return text;
}

}  // namespace

TEST_CASE("The format is that of the first line") {
  const Folder folder;
  const auto format = [&](const std::string& text) {
    return detect_format(folder.write("file", text));
  };
  CHECK(format("\n \r\n__label__a b\n") == Format::kFastText);
  CHECK(format("word\t__label__a") == Format::kFastText);
  CHECK(format("\xEF\xBB\xBF__label__a b\n") == Format::kFastText);
  CHECK(format(gzip("\n__label__a b\n")) == Format::kFastText);
  CHECK(format(criteo("0", {"1"}, {"68fd1e64"})) == Format::kCriteo);
  CHECK(format(gzip(criteo("1", {}, {}, "\r\n"))) == Format::kCriteo);
  const std::string neither =
      ": neither fastText (a __label__NAME among the words) nor Criteo (40 fields separated by "
      "tabs, the first of them 0 or 1): ";
  CHECK(bad_data([&] { format("\nid,price\n1,2\n"); }) ==
        folder.path("file") + ":2:1" + neither + "'id,price'");
  bad_data([&] { format(criteo("2")); });
  bad_data([&] { format("0\t1\t2\n"); });
  CHECK(bad_data([&] { format("\n\n"); }) == folder.path("file") + ": no example in this file");
}

TEST_CASE("A stream has the examples and the vocabulary of read_fast_text()") {
  const Folder folder;
  const int hash_bits = GENERATE(0, 15);
  const std::string first = random_text(1, 3000), second = random_text(2, 2000);
  const TextDataset data = parse_fast_text(first + second, "f", nullptr, Labels::kAll, hash_bits);
  StreamOptions options;
  options.paths = {folder.write("first", first), folder.write("second.gz", gzip(second))};
  const TextVocabulary vocabulary = scan_vocabulary(options.paths, Format::kFastText, hash_bits);
  CHECK(vocabulary.labels == data.vocabulary->labels);
  CHECK(vocabulary.words.all() == data.vocabulary->words.all());
  CHECK(vocabulary.hash_bits == hash_bits);
  CHECK(vocabulary.num_words() == data.vocabulary->num_words());
  options.vocabulary = data.vocabulary;
  options.batch_size = 100;
  options.shuffle_buffer = 700;
  CHECK(sorted(read_epoch(options).examples) == sorted(in_memory(first + second, options)));
  CHECK(read_fast_text(options.paths[1], data.vocabulary, Labels::kAll).tokens ==
        parse_fast_text(second, "f", data.vocabulary).tokens);
}

TEST_CASE("A vocabulary may be that of the first examples") {
  const Folder folder;
  const Strings paths = {folder.write("a", "__label__b one two\n\n__label__c three\n"),
                         folder.write("b", "__label__a four\n")};
  const auto scan = [&](int64_t examples, int hash_bits = 0) {
    return scan_vocabulary(paths, Format::kFastText, hash_bits, BadRows::kStop, examples);
  };
  CHECK(scan(1).words.all() == Strings{"one", "two"});
  CHECK(scan(1).labels == Strings{"b"});
  CHECK(scan(2).words.all() == Strings{"one", "two", "three"});
  CHECK(scan(3).labels == Strings{"a", "b", "c"});
  CHECK(scan(3, 8).words.size() == 0);
  for (const int bits : {-1, 63}) {
    CHECK(error_of(base::ErrorKind::kInvalid, [&] { scan(1, bits); }) ==
          "hash_bits must be in [0, 62], not " + std::to_string(bits));
  }
}

TEST_CASE("Bad rows of a vocabulary's text are errors or skipped") {
  const Folder folder;
  const auto scan = [&](const std::string& text, BadRows bad_rows = BadRows::kStop) {
    return scan_vocabulary({folder.write("file", text)}, Format::kFastText, 0, bad_rows);
  };
  const std::string text = "__label__a one\nbad row\n__label__b two __label__c\n__label__b three\n";
  CHECK(bad_data([&] { scan(text); }) ==
        folder.path("file") + ":2:1: no __label__NAME in the line that begins with 'bad row'");
  const TextVocabulary vocabulary = scan(text, BadRows::kSkip);
  CHECK(vocabulary.words.all() == Strings{"one", "three"});
  CHECK(vocabulary.labels == Strings{"a", "b"});
  CHECK(bad_data([&] { scan("\n\n"); }) == folder.path("file") + ": no example");
  CHECK(bad_data([&] { scan("__label__a\n"); }) ==
        folder.path("file") + ": no word in any example");
}

TEST_CASE("A line of Criteo is a bag of 39 words, and 13 numbers") {
  const Folder folder;
  const Strings categories = {"68fd1e64", "", "any text"};
  const std::string text =
      criteo("1", {"0", "1", "-1", "", "1000000", "9223372036854775807"}, categories) + "\n" +
      criteo("0", {}, {}, "\r\n") + criteo("1", {"-9223372036854775808", "7"}, {}, "");
  StreamOptions options = criteo_options(folder.write("file", text));
  Stream stream(options);
  stream.begin({});
  CHECK(stream.ready() == 1);
  const Batch batch = stream.next();
  CHECK(ints(batch.targets) == Ints{1, 0, 1});
  CHECK(ints(batch.offsets) == Ints{0, 39, 78});
  CHECK(batch.numbers.sizes() == at::IntArrayRef{3, kCriteoNumbers});
  CHECK(batch.numbers.scalar_type() == at::kFloat);
  const Batch none = Batch::empty();
  CHECK(none.size() == 0);
  CHECK(none.indices.view({-1, 39}).sizes() == at::IntArrayRef{0, 39});
  CHECK(none.numbers.sizes() == at::IntArrayRef{0, kCriteoNumbers});
  CHECK(none.numbers.scalar_type() == at::kFloat);
  const auto number = [&](int64_t row, int64_t i) { return batch.numbers[row][i].item<float>(); };
  CHECK(number(0, 0) == 0);
  CHECK(number(0, 1) == std::log(2.0F));
  CHECK(number(0, 2) == 0);
  CHECK(number(0, 3) == 0);
  CHECK(std::abs(number(0, 4) - std::log(1000001.0F)) < 1e-5F);
  CHECK(number(2, 1) == std::log(8.0F));
  CHECK(number(2, 0) == 0);

  // ln(2)² = 0.48, ln(1,000,001)² = 190.9, ln(2^63)² = 1906.9, ln(8)² = 4.3
  const std::string words = as_words("1", {"0", "0", "-", "", "190", "1906"}, {"68fd1e64", ""}) +
                            as_words("0") + as_words("1", {"-", "4"});
  const TextDataset expected = parse_fast_text(words, "f", nullptr, Labels::kAll, kBits);
  Ints tokens = ints(batch.indices);
  CHECK(tokens[15] != expected.tokens[15]);  // has a blank, so that it is no word of fastText
  tokens[15] = expected.tokens[15];
  CHECK(tokens == expected.tokens);
  CHECK(options.vocabulary->labels == Strings{"0", "1"});
  CHECK(error_of(base::ErrorKind::kInvalid, [&] { scan_vocabulary({}, Format::kCriteo, 0); }) ==
        "Criteo data needs hash_bits above 0");
}

TEST_CASE("The place and the reason of a bad row of Criteo are reported") {
  const Folder folder;
  const auto why = [&](const std::string& row) {
    return bad_line(criteo_options(folder.write("file", criteo("1") + "\n" + row)));
  };
  CHECK(why("0\t1\t2") ==
        "3:6: the line ends after 3 fields; an example has 40 (a label, 13 integers and 26 "
        "categories)");
  CHECK(why("x\n").starts_with("3:2: the line ends after 1 field; "));
  CHECK(why(criteo("1", {}, {}, "\textra\n")) ==
        "3:42: more than 40 fields; an example has 40 (a label, 13 integers and 26 categories)");
  CHECK(why(criteo("2")) == "3:1: field 1 (the label) is '2', not 0 or 1");
  CHECK(why(criteo("")) == "3:1: field 1 (the label) is '', not 0 or 1");
  CHECK(why(criteo("0", {"", "12", "abc"})) ==
        "3:7: field 4 (number 3) is 'abc', not an integer of 64 bits");
  for (const char* number : {"1.5", "1 ", "+1", "99999999999999999999", "-"}) {
    CHECK(why(criteo("0", {number})).starts_with("3:3: field 2 (number 1) is '"));
  }
}

TEST_CASE("The place and the reason of a bad row of fastText are reported") {
  const Folder folder;
  const std::string good = folder.write("good", numbered(0, 5));
  StreamOptions options = options_of({good});
  const auto why = [&](const std::string& text) {
    options.paths = {folder.write("file", text)};
    return bad_line(options);
  };
  CHECK(why("__label__a b\n\n  no label here \n") ==
        "3:3: no __label__NAME in the line that begins with 'no label here'");
  CHECK(why("__label__a __label__b c") == "1:12: more than one label; the second is '__label__b'");
  CHECK(why("\xEF\xBB\xBF__label__ c\n") == "1:4: a label without a name: '__label__'");
  CHECK(why("x __label__new\n") ==
        "1:3: a label that the training file does not have: '__label__new'");
}

TEST_CASE("A bad row has its line number in the file in all shards and after a resume") {
  const Folder folder;
  const std::string text = numbered(0, 60) + "bad\n" + numbered(60, 70);
  const std::string path = folder.write("file", GENERATE(false, true) ? gzip(text) : text);
  StreamOptions options = options_of({path}, 4, 8);
  CHECK(bad_line(options).starts_with("61:1: no __label__NAME"));
  Stream stream(options);
  stream.begin({});
  for (int i = 0; i < 5; ++i) stream.next();
  Stream resumed(options);
  resumed.begin(stream.position());
  CHECK(bad_data([&] { read_rest(resumed); }).starts_with(path + ":61:1: no __label__NAME"));
  if (read_text(path) != text) return;
  int found = 0;
  options.shards = 5;
  for (options.shard = 0; options.shard < options.shards; ++options.shard) {
    try {
      read_epoch(options);
    } catch (const base::Exception& exception) {
      CHECK(exception.error().message.starts_with(path + ":61:1: no __label__NAME"));
      ++found;
    }
  }
  CHECK(found == 1);
}

TEST_CASE("The blocks before a bad row are returned") {
  const Folder folder;
  const std::string path = folder.write("file", numbered(0, 100) + "bad\n" + numbered(100, 120));
  Stream stream(options_of({path}, 4, 8));
  stream.begin({});
  int64_t batches = 0;
  CHECK(bad_data([&] {
          for (; stream.ready() > 0; ++batches) {
            stream.next();
            // Most likely, the thread has met the bad row when two batches are left.
            if (batches >= 20) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
        }).starts_with(path + ":101:1: no __label__NAME"));
  CHECK(batches == 24);
}

TEST_CASE("Bad rows are skipped and counted") {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 10; ++i) {
    text += numbered(6 * i, 6 * i + 6) + "bad" + std::to_string(i) + " new\n";
  }
  const int64_t block = GENERATE(4, 8);  // with 4, the last bad row follows the last block
  StreamOptions options = options_of({folder.write("file", text)}, 4, block);
  options.bad_rows = BadRows::kSkip;
  const std::string first =
      options.paths[0] + ":7:1: no __label__NAME in the line that begins with ";
  Stream stream(options);
  stream.begin({});
  const Read whole = read_rest(stream);
  CHECK(whole.examples.size() == 60);
  const Stream::Counts counts = stream.counts();
  CHECK(counts.examples == 60);
  CHECK(counts.bad_rows == 10);
  CHECK(counts.first_bad_row == first + "'bad0 new'");
  CHECK(counts.dropped_tokens == 0);
  CHECK(counts.waited_s >= 0);
  // The counts of a stopped and of a resumed stream add up.
  for (size_t k = 0; k < whole.positions.size(); ++k) {
    Stream before(options), after(options);
    before.begin({});
    for (size_t i = 0; i < k; ++i) before.next();
    CHECK(before.position() == whole.positions[k]);
    after.begin(whole.positions[k]);
    read_rest(after);
    CHECK(before.counts().bad_rows + after.counts().bad_rows == 10);
    CHECK(before.counts().examples + after.counts().examples == 60);
    CHECK(before.counts().first_bad_row.empty() == (before.counts().bad_rows == 0));
    CHECK(after.counts().first_bad_row.empty() == (after.counts().bad_rows == 0));
  }
}

TEST_CASE("Words that the vocabulary does not have are dropped and counted") {
  const Folder folder;
  StreamOptions options = options_of({folder.write("file", "__label__a one two\n")});
  options.paths = {folder.write("file", "__label__a one new\n__label__a new newer\n")};
  options.shuffle_buffer = 0;
  Stream stream(options);
  stream.begin({});
  CHECK(read_rest(stream).examples == std::vector<Ints>{{0, 0}, {0}});
  CHECK(stream.counts().dropped_tokens == 3);
}

}  // namespace distrain::data
