// Tests of tokens that stay in their file, against the same tokens in memory.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "distrain/base/random.h"
#include "distrain/store/hash.h"
#include "gzip.h"
#include "support/catch.h"
#include "support/files.h"
#include "tokens.h"

namespace distrain::data {

using namespace testing;
using namespace std::string_literals;
namespace {

/// Returns a random text of all that separates words and lines, with a few very long words.
std::string random_text(uint64_t seed, int64_t pieces) {
  base::Random random({seed});
  static const std::vector<std::string> kBetween = {" ",      "\t",   "\r\n", "\n",   "\n\n",
                                                    "  \r\n", " \v ", "\f",   "\n \n"};
  std::string text = random.below(2) == 0 ? "" : "\xEF\xBB\xBF";
  if (random.below(2) == 0) text += kBetween[random.below(kBetween.size())];
  for (int64_t i = 0; i < pieces; ++i) {
    text += "w" + std::to_string(random.below(40));
    if (random.below(2000) == 0) text += std::string(random.below(20000), 'x');
    text += kBetween[random.below(kBetween.size())];
  }
  if (random.below(2) == 0) text += "last";
  return text;
}

template <class T>
std::string bytes_of(const Ints& tokens) {
  std::string bytes;
  for (const int64_t token : tokens) {
    for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>(token >> (8 * i));
  }
  return bytes;
}

void check_equal(const Tokens& tokens, const Tokens& expected, uint64_t seed) {
  REQUIRE(tokens.size() == expected.size());
  REQUIRE(all(tokens) == all(expected));
  base::Random random({seed});
  for (int i = 0; i < 50; ++i) {
    const auto first = static_cast<int64_t>(random.below(static_cast<uint64_t>(tokens.size())));
    const int64_t most = std::min<int64_t>(tokens.size() - first, 100);
    const auto count = static_cast<int64_t>(random.below(static_cast<uint64_t>(most) + 1));
    REQUIRE(read(tokens, first, count) == read(expected, first, count));
  }
  CHECK(read(tokens, tokens.size(), 0).empty());
}

std::vector<std::string> words_of(const WordCounts& counts) { return counts.most_frequent().all(); }

}  // namespace

TEST_CASE("Tokens of a text, of a .bin file and in memory are the same") {
  const Folder folder;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    // Up to three pieces of 256 KiB, so that words and line ends cross their borders.
    const int64_t pieces = seed < 8 ? 1 + static_cast<int64_t>(seed) * 700 : 150000;
    CAPTURE(seed);
    const std::string text = random_text(seed, pieces);
    const auto path = folder.write("text", text);
    const Vocabulary words = read_words(path, 30);
    const auto expected = load_text(path, words);

    WordCounts counts(30);
    const TokenIndex index = index_text(path, [&](std::string_view word) { counts.add(word); });
    CHECK(words_of(counts) == words.all());
    CHECK(index.tokens == expected->size());
    CHECK(index.content_hash == store::content_hash(text));
    CHECK(index.offsets.numel() == (index.tokens + 1023) / 1024);
    const auto tokens = open_tokens(path, words, index);
    CHECK(tokens->content_hash() == expected->content_hash());
    check_equal(*tokens, *expected, seed);

    for (const int width : {2, 4}) {
      const Ints numbers = all(*expected);
      const std::string bytes =
          width == 2 ? bytes_of<uint16_t>(numbers) : bytes_of<uint32_t>(numbers);
      const auto bin = folder.write("text.bin", bytes);
      const TokenIndex of_bin = index_bin(bin, width, words.size());
      CHECK(of_bin.content_hash == store::content_hash(bytes));
      check_equal(*open_tokens(bin, words, of_bin), *expected, seed);
    }
  }
}

TEST_CASE("The batches of columns in a file are those of columns in memory") {
  const Folder folder;
  const auto path = folder.write("text", random_text(1, 9000));
  const Vocabulary words = read_words(path, 0);
  const auto in_memory = load_text(path, words),
             in_file = open_tokens(path, words, index_text(path));
  for (const int64_t count : {1, 3}) {
    const TokenColumns expected(*in_memory, 7, 2, count), columns(*in_file, 7, 2, count);
    REQUIRE(columns.steps(35) == expected.steps(35));
    for (int64_t step = 0; step < columns.steps(35); ++step) {
      const auto batch = columns.batch(step, 35), other = expected.batch(step, 35);
      REQUIRE(batch.inputs.equal(other.inputs));
      REQUIRE(batch.targets.equal(other.targets));
    }
  }
}

TEST_CASE("A word may be almost 1 MiB long") {
  const Folder folder;
  const size_t limit = size_t{1} << 20;
  const auto path = folder.write("text", "a " + std::string(limit - 1, 'x') + "\nb");
  const Vocabulary words = read_words(path, 0);
  CHECK(words.size() == 5);
  const auto tokens = open_tokens(path, words, index_text(path));
  CHECK(all(*tokens) == Ints{2, 3, 1, 4, 1});
  folder.write("text", "a " + std::string(limit, 'x') + "\nb");
  const std::string message = path + ": a word of 1 MiB or more begins at byte 3";
  CHECK(bad_data([&] { index_text(path); }) == message);
  CHECK(bad_data([&] { load_text(path, words); }) == message);
}

TEST_CASE("A text in memory may be compressed, and its tokens are those of the unpacked text") {
  const Folder folder;
  const std::string text = random_text(3, 5000);
  const auto path = folder.write("text", text), packed = folder.write("text.gz", gzip(text));
  const Vocabulary words = read_words(packed, 20, text.size());
  CHECK(words.all() == read_words(path, 20).all());
  const auto tokens = load_text(packed, words, text.size());
  CHECK(all(*tokens) == all(*load_text(path, words)));
  CHECK(tokens->content_hash() == store::content_hash(text));
  const uint64_t less = text.size() - 1;
  CHECK(bad_data([&] { load_text(packed, words, less); }) ==
        packed + ": longer than the " + std::to_string(less) +
            " bytes of --in-memory: unpack it with gunzip");
  CHECK(bad_data([&] { index_text(packed, {}, less); }) ==
        bad_data([&] { load_text(packed, words, less); }));
}

TEST_CASE("Counting keeps the frequent words if there are too many different words") {
  WordCounts counts(4, 100);
  for (int i = 0; i < 2000; ++i) {
    for (const char* word : {"often", "usual"}) counts.add(word);
    counts.add("often");
    counts.add("rare" + std::to_string(i));
  }
  CHECK(words_of(counts) == std::vector<std::string>{"<unk>", "<eos>", "often", "usual"});
  WordCounts without_limit(0, 100);
  for (int i = 0; i < 2000; ++i) without_limit.add(std::to_string(i));
  CHECK(without_limit.most_frequent().size() == 2002);
}

TEST_CASE("A .bin file that does not fit its type or vocabulary is refused") {
  const Folder folder;
  const auto path = folder.write("t.bin", bytes_of<uint16_t>({1, 2, 3, 49}));
  CHECK(index_bin(path, 2, 50).tokens == 4);
  const std::string message =
      path + ": token 3 is 49, but the vocabulary has the numbers from 0 to 48";
  CHECK(bad_data([&] { index_bin(path, 2, 49); }) == message);
  const TokenIndex index = index_bin(path, 2, 50);
  const Vocabulary numbers = number_words(49);
  const auto tokens = open_tokens(path, numbers, index);
  CHECK(read(*tokens, 0, 3) == Ints{1, 2, 3});
  CHECK(bad_data([&] { read(*tokens, 2, 2); }) == message);
  CHECK(bad_data([&] { index_bin(path, 4, 50); }) ==
        path + ": token 0 is 131073, but the vocabulary has the numbers from 0 to 49");
  folder.write("t.bin", "abc");
  CHECK(bad_data([&] { index_bin(path, 2, 1 << 16); }) ==
        path + ": 3 bytes are not a whole number of tokens of 2 bytes");
  folder.write("t.bin", "");
  CHECK(bad_data([&] { index_bin(path, 2, 50); }) == path + ": the file is empty");
  CHECK(bad_data([&] { index_bin(folder.path("."), 2, 50); }).ends_with(": not a regular file"));
}

TEST_CASE("A file that has changed since it was indexed is refused") {
  const Folder folder;
  const Vocabulary words(std::vector<std::string>{"<unk>", "<eos>", "a"});
  const std::string text(4000, 'a');
  const auto path = folder.write("text", text);
  const TokenIndex index = index_text(path), of_bin = index_bin(path, 2, 1 << 16);
  for (const auto& other : {text + "\n", text.substr(1), "b" + text.substr(1)}) {
    folder.write("text", other);
    const std::string begin = path + ": its size or its first 64 KiB are not those of the file";
    CHECK(bad_data([&] { open_tokens(path, words, index); }).starts_with(begin));
    CHECK(bad_data([&] { open_tokens(path, words, of_bin); }).starts_with(begin));
    CHECK(bad_data([&] { open_tokens(path, words, {}); }).starts_with(begin));
  }
  folder.write("text", text);
  const auto tokens = open_tokens(path, words, index);
  const auto numbers = open_tokens(path, words, of_bin);
  std::filesystem::resize_file(path, 10);
  const std::string message = path + ": cut short while it is read";
  CHECK(bad_data([&] { read(*tokens, 0, 1); }) == message);
  CHECK(bad_data([&] { read(*numbers, 10, 1); }) == message);
}

TEST_CASE("A file that grows is read up to its indexed size") {
  const Folder folder;
  const Vocabulary words(std::vector<std::string>{"<unk>", "<eos>", "a"});
  const auto path = folder.write("text", "a a");
  const auto tokens = open_tokens(path, words, index_text(path));
  std::ofstream(path, std::ios::app) << "a b";
  CHECK(all(*tokens) == Ints{2, 2, 1});
}

TEST_CASE("The vocabulary of .bin files is numbers, and lines of numbers have no <eos>") {
  const Folder folder;
  const Vocabulary numbers = number_words(13);
  CHECK(!has_reserved_words(numbers));
  CHECK(has_reserved_words(Vocabulary(std::vector<std::string>{"<unk>", "<eos>"})));
  CHECK(numbers.size() == 13);
  CHECK(to_tokens("12 0 1", numbers) == Ints{12, 0, 1});
  std::vector<Ints> lines;
  for_each_line(*load_text(folder.write("text", "12 1 7\n0\n"), numbers), numbers,
                [&](const Ints& line) { lines.push_back(line); });
  CHECK(lines == std::vector<Ints>{{12, 1, 7}, {0}});
  CHECK(bad_data([&] { to_tokens("1 13", numbers); }) ==
        "'13' is not the number of a token below 13");
}

}  // namespace distrain::data
