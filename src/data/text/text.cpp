#include "text.h"

namespace distrain::data {

// Like git, takes a file with a zero byte among its first 8,000 for binary.
std::string read_text(const store::InputFile& file) {
  constexpr size_t kLooked = 8000;
  auto text = store::read_to_end<std::string>(file);
  const auto refuse = [&](const std::string& why) { base::bad_data(file.path() + ": " + why); };
  if (text.starts_with("\x1F\x8B")) refuse("compressed with gzip: unpack it first with gunzip");
  if (text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF")) {
    refuse("UTF-16 text: convert it to UTF-8 first with iconv -f UTF-16 -t UTF-8");
  }
  const size_t zero = std::string_view(text).substr(0, kLooked).find('\0');
  if (zero != std::string_view::npos) {
    refuse("a binary file, not text: byte " + std::to_string(zero + 1) + " is zero");
  }
  return text;
}

}  // namespace distrain::data
