#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "distrain/data/tokens.h"
#include "distrain/store/hash.h"
#include "support/catch.h"
#include "support/files.h"
#include "tokens.h"

namespace distrain::data {

using namespace testing;
namespace {

using Strings = std::vector<std::string>;
using namespace std::string_literals;

Strings all(const Vocabulary& words) {
  Strings result;
  for (int64_t i = 0; i < words.size(); ++i) result.emplace_back(words.word(i));
  return result;
}

template <class F>
std::string invalid(F call) {
  return error_of(base::ErrorKind::kInvalid, call);
}

TokensPtr count_to(int64_t count) {
  std::vector<int32_t> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), 0);
  return make_tokens(result);
}

}  // namespace

TEST_CASE("Words are numbered by falling frequency, then by appearance") {
  const Folder folder;
  const auto path = folder.write("text", "b a c c\nd a c\n");
  CHECK(all(read_words(path, 0)) == Strings{"<unk>", "<eos>", "c", "a", "b", "d"});
  CHECK(all(read_words(path, 4)) == Strings{"<unk>", "<eos>", "c", "a"});
  CHECK(all(read_words(path, 2)) == Strings{"<unk>", "<eos>"});
  CHECK(read_words(path, 100).size() == 6);
  CHECK(read_words(path, 6).size() == 6);
}

TEST_CASE("<unk> and <eos> in a text are the reserved words") {
  const Folder folder;
  const auto path = folder.write("text", "x <unk> <unk> <unk>\n<eos> y y\n");
  const Vocabulary words = read_words(path, 0);
  CHECK(all(words) == Strings{"<unk>", "<eos>", "y", "x"});
  CHECK(all(*load_text(path, words)) == Ints{3, 0, 0, 0, 1, 1, 2, 2, 1});
}

TEST_CASE("Each line with a word ends with <eos>") {
  const Folder folder;
  const auto words = read_words(folder.write("train", "one two two\n"), 0);
  const Ints expected{3, 2, kEndOfLine, kUnknownWord, kEndOfLine};
  for (const auto& text : {"one two\nnew\n"s, "one two\nnew"s, "\n\none\ttwo \r\n \t\n\nnew\r\n\n"s,
                           "\xEF\xBB\xBFone two\nnew\n"s, "one\ftwo\n\vnew\f\n"s}) {
    const auto tokens = load_text(folder.write("text", text), words);
    CHECK(all(*tokens) == expected);
    CHECK(tokens->content_hash() == store::content_hash(text));
  }
}

TEST_CASE("A file that is not plain text is refused with advice") {
  const Folder folder;
  const auto why = [&](const std::string& bytes) {
    const auto path = folder.write("file", bytes);
    const std::string message = bad_data([&] { read_words(path, 0); });
    CHECK(bad_data([&] { load_text(path, Vocabulary()); }) == message);
    CHECK(bad_data([&] { index_text(path); }) == message);
    CHECK(bad_data([&] { read_fast_text(path); }) == message);
    CHECK(message.starts_with(path + ": "));
    return message.substr(path.size() + 2);
  };
  CHECK(why("\x1F\x8B\x08 word\n") == "the gzip file is damaged");
  const auto utf_16 = "UTF-16 text: convert it to UTF-8 first with iconv -f UTF-16 -t UTF-8";
  CHECK(why("\xFF\xFEw\0"s) == utf_16);
  CHECK(why("\xFE\xFF\0w"s) == utf_16);
  CHECK(why("__label__a w\0"s) == "a binary file, not text: byte 13 is zero");
  const auto late = folder.write("late", std::string(8000, 'w') + "\0w\n"s);
  CHECK(read_words(late, 0).size() == 4);
}

TEST_CASE("A prompt has its words and no <eos>") {
  const Folder folder;
  const auto words = read_words(folder.write("train", "one two two\n"), 0);
  CHECK(to_tokens(" two one\nnew  two ", words) == Ints{2, 3, kUnknownWord, 2});
  CHECK(to_tokens("", words).empty());
  CHECK(to_tokens(" \n ", words).empty());
}

TEST_CASE("The lines of a text have its words without <eos>") {
  const Folder folder;
  const auto words = read_words(folder.write("train", "one two two\nthree\n"), 0);
  const auto text = folder.write("text", "two one\n\n new\nthree three");
  std::vector<Ints> lines;
  for_each_line(*load_text(text, words), words, [&](const Ints& line) { lines.push_back(line); });
  CHECK(lines == std::vector<Ints>{{2, 3}, {kUnknownWord}, {4, 4}});
}

TEST_CASE("A vocabulary is restored from its words") {
  const Folder folder;
  const auto words = read_words(folder.write("train", "one two two\n"), 0);
  CHECK(Vocabulary(words.all()).all() == Strings{"<unk>", "<eos>", "two", "one"});
}

TEST_CASE("A random text has words of the whole vocabulary and depends on its seed") {
  const Ints words = all(*random_tokens(1, 5, 1000));
  CHECK(words.size() == 1000);
  CHECK(std::set<int64_t>(words.begin(), words.end()) == std::set<int64_t>{0, 1, 2, 3, 4});
  CHECK(words == all(*random_tokens(1, 5, 1000)));
  CHECK(words != all(*random_tokens(2, 5, 1000)));
}

TEST_CASE("A text that cannot be read or has no word is an error with its name") {
  const Folder folder;
  const Vocabulary words;
  const auto missing = folder.path("missing");
  const std::string no_file = "cannot open " + missing + ": No such file or directory";
  CHECK(bad_data([&] { read_words(missing, 0); }) == no_file);
  CHECK(bad_data([&] { load_text(missing, words); }) == no_file);
  for (const auto& text : {""s, "\n"s, " \r\n\t\n"s, "\xEF\xBB\xBF"s}) {
    const auto path = folder.write("empty", text);
    CHECK(bad_data([&] { read_words(path, 0); }) == path + ": no word in this file");
    CHECK(bad_data([&] { load_text(path, words); }) == path + ": no word in this file");
  }
  const auto path = folder.write("text", "a\n");
  for (const int64_t max_words : {-1, 1}) {
    CHECK(invalid([&] { read_words(path, max_words); }) ==
          "a vocabulary has at least 2 words, <unk> and <eos>, or 0 for all, not " +
              std::to_string(max_words));
  }
}

TEST_CASE("Columns are read side by side, each with its next word as target") {
  const auto numbers = count_to(11);  // two columns of 5 tokens, one token left over
  const Tokens& tokens = *numbers;
  const TokenColumns columns(tokens, 2, 0, 2);
  CHECK(columns.steps(3) == 2);
  const auto first = columns.batch(0, 3);
  CHECK(first.inputs.sizes() == at::IntArrayRef{3, 2});
  CHECK(ints(first.inputs) == Ints{0, 5, 1, 6, 2, 7});
  CHECK(ints(first.targets) == Ints{1, 6, 2, 7, 3, 8});
  const auto last = columns.batch(1, 3);
  CHECK(last.inputs.sizes() == at::IntArrayRef{1, 2});
  CHECK(ints(last.inputs) == Ints{3, 8});
  CHECK(ints(last.targets) == Ints{4, 9});

  const TokenColumns second(tokens, 2, 1, 1);
  CHECK(ints(second.batch(0, 10).inputs) == Ints{5, 6, 7, 8});
  CHECK(ints(second.batch(0, 10).targets) == Ints{6, 7, 8, 9});
  CHECK(second.steps(10) == 1);
  CHECK(second.steps(4) == 1);
  CHECK(second.steps(1) == 4);
  CHECK(second.steps(INT64_MAX) == 1);
}

TEST_CASE("The batches of a column have all its words once") {
  const auto numbers = count_to(103);
  const Tokens& tokens = *numbers;
  for (int64_t columns = 1; columns <= 51; ++columns) {
    for (const int64_t length : {1, 2, 3, 7, 50, 1000}) {
      const int64_t size = 103 / columns;
      Ints inputs;
      const TokenColumns last(tokens, columns, columns - 1, 1);
      for (int64_t step = 0; step < last.steps(length); ++step) {
        const auto batch = last.batch(step, length);
        REQUIRE(batch.inputs.size(0) >= 1);
        REQUIRE(batch.inputs.size(0) <= length);
        const Ints words = ints(batch.inputs), next = ints(batch.targets);
        REQUIRE(next.size() == words.size());
        for (size_t i = 0; i < words.size(); ++i) {
          inputs.push_back(words[i]);
          REQUIRE(next[i] == words[i] + 1);
        }
      }
      REQUIRE(inputs.size() == static_cast<size_t>(size - 1));
      REQUIRE(inputs.front() == (columns - 1) * size);
      REQUIRE(inputs.back() == columns * size - 2);
    }
  }
}

TEST_CASE("Impossible columns are refused") {
  const auto numbers = count_to(10);
  const Tokens& tokens = *numbers;
  CHECK(bad_data([&] { TokenColumns(tokens, 6, 0, 1); }) ==
        "10 tokens are too few for 6 columns of at least two tokens: a smaller --batch-size or "
        "--accumulate makes fewer");
  CHECK(bad_data([&] {
          TokenColumns(*make_tokens({}), 1, 0, 1);
        }).starts_with("0 tokens are too few"));
  CHECK(bad_data([&] {
          TokenColumns(tokens, INT64_MAX, INT64_MAX - 1, 1);
        }).starts_with("10 tokens are too few"));
  CHECK(TokenColumns(tokens, 5, 0, 1).steps(1) == 1);
  invalid([&] { TokenColumns(tokens, 0, 0, 1); });
  invalid([&] { TokenColumns(tokens, 2, -1, 1); });
  invalid([&] { TokenColumns(tokens, 2, 2, 1); });
  invalid([&] { TokenColumns(tokens, 2, 1, 2); });
  invalid([&] { TokenColumns(tokens, 2, 0, 0); });
  const TokenColumns columns(tokens, 2, 0, 2);
  invalid([&] { static_cast<void>(columns.steps(0)); });
  invalid([&] { columns.batch(-1, 2); });
  CHECK(invalid([&] { columns.batch(2, 2); }) == "these columns have no step 2");
}

}  // namespace distrain::data
