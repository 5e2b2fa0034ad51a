#include <algorithm>
#include <numeric>
#include <vector>

#include "distrain/base/streaming_copy.h"
#include "support/catch.h"

using namespace distrain;

TEST_CASE("a streaming copy of any size and alignment copies exactly the bytes") {
  constexpr size_t kMiB = size_t{1} << 20;
  std::vector<uint8_t> from(kMiB + 500);
  std::iota(from.begin(), from.end(), uint8_t{1});
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{63}, kMiB - 1, kMiB, kMiB + 1, kMiB + 65}) {
    for (const size_t offset : {0, 1, 16, 63, 64, 127}) {
      std::vector<uint8_t> to(size + 300, 0xee);
      base::streaming_copy(to.data() + offset, from.data() + 3, size);
      CAPTURE(size, offset);
      CHECK(std::equal(to.begin() + long(offset), to.begin() + long(offset + size),
                       from.begin() + 3));
      CHECK(std::count(to.begin(), to.begin() + long(offset), 0xee) == long(offset));
      CHECK(std::count(to.begin() + long(offset + size), to.end(), 0xee) == long(300 - offset));
    }
  }
}
