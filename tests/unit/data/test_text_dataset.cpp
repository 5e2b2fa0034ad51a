#include <chrono>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/data/text.h"
#include "distrain/store/hash.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

using Ints = std::vector<int64_t>;
using Strings = std::vector<std::string>;
using namespace std::string_literals;

std::string bad_text(std::string_view text) {
  return bad_data([&] { parse_fast_text(text, "f"); });
}

Strings words(const TextDataset& data) {
  Strings result;
  for (int64_t i = 0; i < data.vocabulary->num_words(); ++i) {
    result.emplace_back(data.vocabulary->words.word(i));
  }
  return result;
}

}  // namespace

TEST_CASE("A text is read into tokens, offsets and labels") {
  const TextDataset data = parse_fast_text("__label__b one two one\n__label__a three two\n", "f");
  CHECK(data.size() == 2);
  CHECK(words(data) == Strings{"one", "two", "three"});
  CHECK(data.vocabulary->labels == Strings{"a", "b"});
  CHECK(data.tokens == Ints{0, 1, 0, 2, 1});
  CHECK(data.offsets == Ints{0, 3, 5});
  CHECK(data.labels == Ints{1, 0});
  CHECK(data.vocabulary->num_words() == 3);
  CHECK(std::ssize(data.vocabulary->labels) == 2);
  CHECK(data.dropped_tokens == 0);
}

TEST_CASE("Line ends, blanks and empty lines do not matter") {
  const std::string plain = "__label__x a b\n__label__y c\n";
  const TextDataset expected = parse_fast_text(plain, "f");
  const std::string text =
      GENERATE("__label__x a b\n__label__y c"s, "__label__x a b\r\n__label__y c\r\n"s,
               "\n\n__label__x\ta \t b \n \t\r\n\n__label__y  c\n\n"s,
               "  __label__x a b\n __label__y c\n"s, "\xEF\xBB\xBF__label__x a b\n__label__y c\n"s,
               "a __label__x b\nc __label__y\n"s, "__label__x a\0b\n__label__y\vc\f\n"s);
  const TextDataset data = parse_fast_text(text, "f");
  CHECK(data.tokens == expected.tokens);
  CHECK(data.offsets == expected.offsets);
  CHECK(data.labels == expected.labels);
  CHECK(words(data) == words(expected));
}

TEST_CASE("A label without a word gives an empty bag") {
  const TextDataset data = parse_fast_text("__label__a\n__label__b w\n__label__a", "f");
  CHECK(data.offsets == Ints{0, 0, 1, 1});
  CHECK(data.labels == Ints{0, 1, 0});
}

TEST_CASE("Words may be invalid UTF-8") {
  const TextDataset data = parse_fast_text("__label__\xFF \xC3\x28 \x80 caf\xC3\xA9\n", "f");
  CHECK(words(data) == Strings{"\xC3\x28", "\x80", "caf\xC3\xA9"});
  CHECK(data.vocabulary->labels == Strings{"\xFF"});
}

TEST_CASE("Labels are numbered by name, words by first appearance") {
  const TextDataset data = parse_fast_text("__label__c z\n__label__a y\n__label__b x z\n", "f");
  CHECK(data.vocabulary->labels == Strings{"a", "b", "c"});
  CHECK(data.labels == Ints{2, 0, 1});
  CHECK(words(data) == Strings{"z", "y", "x"});
}

TEST_CASE("A wrong line is named by file and number") {
  CHECK(bad_text("__label__a b\n\nno label here\n") ==
        "f:3: no __label__NAME in the line that begins with 'no label here'");
  CHECK(bad_text("__label__a __label__b c") ==
        "f:1: more than one label; the second is '__label__b'");
  CHECK(bad_text("__label__a b\n__label__ c\n") == "f:2: a label without a name: '__label__'");
  CHECK(bad_text("__label_a b") ==
        "f:1: no __label__NAME in the line that begins with '__label_a b'");
  CHECK(bad_text("\xEF\xBB\xBF"
                 "x\n") == "f:1: no __label__NAME in the line that begins with 'x'");
}

TEST_CASE("A quoted line is short, on one line and still UTF-8") {
  CHECK(bad_text("a\x01"
                 "b\x1B[31m c")
            .find("'a?b?[31m c'") != std::string::npos);
  const std::string line(39, 'x');
  CHECK(bad_text(line + "\xC3\xA9 tail").ends_with("'" + line + "…'"));
  CHECK(bad_text(std::string(1 << 20, 'x')).size() < 200);
}

TEST_CASE("A text without examples or words is an error") {
  for (const std::string& text : {""s, "\n"s, " \r\n\t\n"s, "\xEF\xBB\xBF"s, "\0"s}) {
    CHECK(bad_text(text) == "f: no example in this file");
  }
  CHECK(bad_text("__label__a\n__label__b\n") == "f: no word in any example");
}

TEST_CASE("A test text is encoded with the training vocabulary") {
  const TextDataset train = parse_fast_text("__label__b one two\n__label__a three\n", "train");
  const TextDataset test =
      parse_fast_text("__label__a two new three\n__label__b new\n", "test", train.vocabulary);
  CHECK(test.tokens == Ints{1, 2});
  CHECK(test.offsets == Ints{0, 2, 2});
  CHECK(test.labels == Ints{0, 1});
  CHECK(test.dropped_tokens == 2);
  CHECK(test.vocabulary == train.vocabulary);
  CHECK(bad_data([&] { parse_fast_text("\n__label__c one", "test", train.vocabulary); }) ==
        "test:2: a label that the training file does not have: '__label__c'");
  CHECK(bad_data([&] { parse_fast_text("\n", "test", train.vocabulary); }) ==
        "test: no example in this file");
}

TEST_CASE("Examples for prediction need no label") {
  const TextDataset train = parse_fast_text("__label__b one two\n__label__a three\n", "train");
  const TextDataset data =
      parse_fast_text("two\n\n__label__a one\nnew\n", "f", train.vocabulary, Labels::kSome);
  CHECK(data.labels == Ints{-1, 0, -1});
  CHECK(data.offsets == Ints{0, 1, 2, 2});
  CHECK(train.vocabulary->words.all() == std::vector<std::string>{"one", "two", "three"});
}

TEST_CASE("A file is read as the same text in memory") {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 20'000; ++i) {
    text += "__label__" + std::to_string(i % 7) + " w" + std::to_string(i % 1000) + " x\n";
  }
  const TextDataset expected = parse_fast_text(text, "f");
  const TextDataset data = read_fast_text(folder.write("train", text));
  CHECK(data.tokens == expected.tokens);
  CHECK(data.content_hash == expected.content_hash);
  CHECK(data.content_hash == store::content_hash(text));
  CHECK(data.content_hash != parse_fast_text(text + "\n", "f").content_hash);
  CHECK(read_fast_text(folder.path("train"), data.vocabulary).tokens == expected.tokens);

  const std::string pipe = folder.path("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::thread writer([&] { std::ofstream(pipe, std::ios::binary) << text; });
  CHECK(read_fast_text(pipe).tokens == expected.tokens);
  writer.join();
}

TEST_CASE("A file that cannot be read is an error with its name") {
  const Folder folder;
  const std::string missing = folder.path("missing");
  CHECK(bad_data([&] { read_fast_text(missing); }) ==
        "cannot open " + missing + ": No such file or directory");
  const std::string directory = folder.path(".");
  CHECK(bad_data([&] { read_fast_text(directory); }) ==
        "cannot read " + directory + ": Is a directory");
  const std::string empty = folder.write("empty", "");
  CHECK(bad_data([&] { read_fast_text(empty); }) == empty + ": no example in this file");
  if (geteuid() != 0) {
    const std::string secret = folder.write("secret", "__label__a b\n");
    chmod(secret.c_str(), 0);
    CHECK(bad_data([&] { read_fast_text(secret); }) ==
          "cannot open " + secret + ": Permission denied");
  }
}

TEST_CASE("A line may be long") {
  std::string text = "__label__a";
  for (int i = 0; i < 300'000; ++i) text += " w" + std::to_string(i % 5000);
  const TextDataset data = parse_fast_text(text, "f");
  CHECK(data.tokens.size() == 300'000);
  CHECK(data.vocabulary->num_words() == 5000);
  CHECK(parse_fast_text("__label__a " + std::string(8 << 20, 'x'), "f").vocabulary->num_words() ==
        1);
}

TEST_CASE("A vocabulary keeps its numbers while it grows") {
  Vocabulary vocabulary;
  CHECK(vocabulary.find("a") == Vocabulary::kUnknown);
  for (int i = 0; i < 50'000; ++i) REQUIRE(vocabulary.add("w" + std::to_string(i)) == i);
  for (int i = 0; i < 50'000; ++i) {
    REQUIRE(vocabulary.find("w" + std::to_string(i)) == i);
    REQUIRE(vocabulary.word(i) == "w" + std::to_string(i));
    REQUIRE(vocabulary.add("w" + std::to_string(i)) == i);
  }
  CHECK(vocabulary.size() == 50'000);
  CHECK(vocabulary.find("w50000") == Vocabulary::kUnknown);
}

TEST_CASE("The hash is XXH64") {
  CHECK(store::content_hash("") == 0xEF46DB3751D8E999ULL);
  CHECK(store::content_hash("a") == 0xD24EC4F1A98C6E5BULL);
  CHECK(store::content_hash("abc") == 0x44BC2CF5AD770999ULL);
  CHECK(store::content_hash("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1ULL);
}

TEST_CASE("Random bytes are read or refused without a crash") {
  const std::vector<std::string> pieces = {"__label__", "__label__a ", "__label__b", "word ",
                                           "\n",        "\r\n",        "\t",         " ",
                                           "\0"s,       "\xEF\xBB\xBF"};
  const TextDataset train = parse_fast_text("__label__a word\n__label__b other\n", "train");
  base::Random random({7});
  int read = 0;
  for (int run = 0; run < 20'000; ++run) {
    std::string text;
    const uint64_t parts = random.below(12);
    for (uint64_t i = 0; i < parts; ++i) {
      if (random.below(4) == 0) {
        text += static_cast<char>(random.below(256));
      } else {
        text += pieces[random.below(pieces.size())];
      }
    }
    const auto known = run % 2 == 0 ? nullptr : train.vocabulary;
    try {
      const TextDataset data = parse_fast_text(text, "f", known);
      ++read;
      REQUIRE(data.size() > 0);
      REQUIRE(data.offsets.size() == data.labels.size() + 1);
      REQUIRE(data.offsets.back() == static_cast<int64_t>(data.tokens.size()));
      for (const int64_t token : data.tokens)
        REQUIRE((token >= 0 && token < data.vocabulary->num_words()));
      for (const int64_t label : data.labels)
        REQUIRE((label >= 0 && label < std::ssize(data.vocabulary->labels)));
    } catch (const base::Exception& exception) {
      REQUIRE(exception.kind() == base::ErrorKind::kBadData);
      REQUIRE(exception.error().message.starts_with("f:"));
    }
  }
  CHECK(read > 1000);
}

TEST_CASE("words of all lengths that differ in any byte have their own numbers") {
  // Words of up to 20 bytes over two letters that differ in one bit: all up to 10 bytes, and longer
  // ones that differ in one byte.
  std::vector<std::string> words{""};
  for (int size = 1; size <= 10; ++size) {
    for (int bits = 0; bits < 1 << size; ++bits) {
      std::string& word = words.emplace_back();
      for (int i = 0; i < size; ++i) word.push_back(bits >> i & 1 ? 'a' : 'c');
    }
  }
  for (size_t size = 11; size <= 20; ++size) {
    for (size_t i = 0; i < size; ++i) {
      words.emplace_back(size, 'a');
      words.back()[i] = 'c';
    }
  }
  const Vocabulary vocabulary(words);
  REQUIRE(vocabulary.size() == std::ssize(words));
  for (size_t i = 0; i < words.size(); ++i) {
    REQUIRE(vocabulary.find(words[i]) == static_cast<int64_t>(i));
    REQUIRE(vocabulary.find(words[i] + "b") == Vocabulary::kUnknown);
  }
}

}  // namespace distrain::data
