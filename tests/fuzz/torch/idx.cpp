// Fuzz targets for files: pairs of IDX files, plain or compressed, and gzip files.
#include <algorithm>
#include <cstring>
#include <string>

#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include "distrain/base/error.h"
#include "distrain/data/images.h"
#include "distrain/store/file.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

constexpr size_t kMostContent = size_t{1} << 20;

// A file in memory that readers can open by its path().
class MemoryFile {
 public:
  explicit MemoryFile(Input bytes) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    check(fd_ >= 0 && write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "the input can be written to a file in memory");
  }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  const int fd_;
};

Bytes deflate(Input content, int window_bits) {
  z_stream stream{};
  check(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, window_bits, 8, Z_DEFAULT_STRATEGY) == Z_OK,
        "zlib deflates");
  Bytes out(deflateBound(&stream, content.size()) + 32);
  stream.next_in = const_cast<uint8_t*>(content.data());
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  check(::deflate(&stream, Z_FINISH) == Z_STREAM_END, "zlib deflates");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

Bytes gzip(Input content) { return deflate(content, 16 + MAX_WBITS); }

struct Inflated {
  Bytes content;
  size_t taken = 0;  // number of input bytes read
};

// Inflates a raw deflate stream. Returns nullopt if it is incomplete or the content is too large.
std::optional<Inflated> inflate_raw(Input input) {
  z_stream stream{};
  check(inflateInit2(&stream, -MAX_WBITS) == Z_OK, "zlib inflates");
  Bytes out(std::min<size_t>(kMostContent, 1100 * input.size() + 64));
  stream.next_in = const_cast<uint8_t*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  const bool whole = inflate(&stream, Z_FINISH) == Z_STREAM_END;
  out.resize(stream.total_out);
  const size_t taken = stream.total_in;
  inflateEnd(&stream);
  if (!whole) return std::nullopt;
  return Inflated{std::move(out), taken};
}

// Wraps a raw deflate stream as a gzip member, with the checksum and length of its content.
Bytes gzip_member(Input raw, Input content) {
  Bytes member = {0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3};
  member.insert(member.end(), raw.begin(), raw.end());
  const auto put = [&member](uint32_t number) {
    for (int i = 0; i < 4; ++i) member.push_back(static_cast<uint8_t>(number >> 8 * i));
  };
  put(static_cast<uint32_t>(crc32(0, content.data(), static_cast<uInt>(content.size()))));
  put(static_cast<uint32_t>(content.size()));
  return member;
}

// Reads a file, `piece` bytes at a time. Returns its content, or nullopt if the file is refused.
std::optional<Bytes> read_all(Input file_bytes, size_t piece) {
  const MemoryFile file(file_bytes);
  const MemoryLimit limit(kSmall + 4 * (kMostContent + piece), "what was read of it");
  try {
    store::GzipReader reader(store::InputFile(file.path()),
                             {kMostContent + piece, "that are tried"});
    Bytes content;
    for (;;) {
      const size_t before = content.size();
      content.resize(before + piece);
      const size_t got = reader.read(content.data() + before, piece);
      check(got <= piece, "no more is read than was asked for");
      content.resize(before + got);
      if (got < piece || content.size() > kMostContent) return content;
    }
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kBadData, "a damaged file is refused as 'bad_data'");
    return std::nullopt;
  }
}

// Checks GzipReader. The input is a byte and then a file or a raw deflate stream. Bits 0 to 3 of
// the byte are log2 of the read size, bits 6 and 7 the number of extra copies of the gzip member.
void run_gzip(Input input) {
  if (input.empty()) return;
  const size_t piece = size_t{1} << (input[0] & 15);
  const Input rest = input.subspan(1);
  const std::optional<Bytes> plain = read_all(rest, piece);
  const bool is_gzip = rest.size() >= 2 && rest[0] == 0x1f && rest[1] == 0x8b;
  check(is_gzip || (plain && std::equal(plain->begin(), plain->end(), rest.begin(), rest.end())),
        "what is not gzip is read as it is");

  const std::optional<Inflated> raw = inflate_raw(rest);
  if (!raw) return;
  const Bytes member = gzip_member(rest.first(raw->taken), raw->content);
  Bytes file;
  Bytes expected;
  for (int copies = 1 + (input[0] >> 6); copies > 0; --copies) {
    file.insert(file.end(), member.begin(), member.end());
    expected.insert(expected.end(), raw->content.begin(), raw->content.end());
  }
  if (expected.size() > kMostContent) return;
  check(read_all(file, piece) == expected, "a gzip file gives what its members hold");
  file[file.size() - 1 - (input[0] & 7)] ^= 0x10;
  check(!read_all(file, piece), "a wrong check sum or length is seen");
  file.resize(file.size() - 9);
  check(!read_all(file, piece), "a file that is cut short is seen");
}

std::vector<Bytes> gzip_seeds() {
  std::vector<Bytes> seeds;
  Bytes content(300, 7);
  for (size_t i = 0; i < 100; ++i) content[i] = static_cast<uint8_t>(i * i);
  for (const Bytes& rest : {deflate(content, -MAX_WBITS), gzip(content), gzip({}), Bytes(3)}) {
    seeds.push_back({0x45});
    seeds.back().insert(seeds.back().end(), rest.begin(), rest.end());
  }
  return seeds;
}

// Checks read_idx(). The input is: u8 flags · u16 size of the image file · image file · label file.
// Flag 1 makes the target compress the image file, flag 2 the label file.
void run_idx(Input input) {
  if (input.size() < 3) return;
  const Input files = input.subspan(3);
  const size_t split = std::min<size_t>(input[1] | input[2] << 8, files.size());
  const Input images = files.first(split);
  const Input labels = files.subspan(split);
  const auto as_stored = [](Input bytes, bool zipped) {
    return zipped ? gzip(bytes) : Bytes(bytes.begin(), bytes.end());
  };
  const MemoryFile images_file(as_stored(images, (input[0] & 1) != 0));
  const MemoryFile labels_file(as_stored(labels, (input[0] & 2) != 0));
  // A header alone may allocate 1 MiB, and if the input is gzip data, it may expand 1000-fold.
  const MemoryLimit limit((size_t{8} << 20) + 4096 * input.size(), "what the files hold");
  try {
    const data::ImageSet set = data::read_idx(images_file.path(), labels_file.path());
    check(set.count > 0 && set.rows > 0 && set.columns > 0 && set.channels == 1,
          "there are images");
    check(set.pixels.size() == static_cast<size_t>(set.count * set.rows * set.columns),
          "each pixel is there");
    check(set.labels.size() == static_cast<size_t>(set.count), "each image has a label");
    const auto holds = [](Input file, const Bytes& elements) {
      const bool is_gzip = file.size() > 1 && file[0] == 0x1f && file[1] == 0x8b;
      return is_gzip || std::equal(elements.rbegin(), elements.rend(), file.rbegin());
    };
    check(holds(images, set.pixels) && holds(labels, set.labels), "they are the files' bytes");
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kBadData, "what does not fit is refused as 'bad_data'");
  }
}

std::vector<Bytes> idx_seeds() {
  Bytes images = {0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3};
  for (uint8_t i = 0; i < 12; ++i) images.push_back(i);
  const Bytes labels = {0, 0, 8, 1, 0, 0, 0, 2, 4, 5};
  std::vector<Bytes> seeds;
  for (uint8_t flags = 0; flags < 4; ++flags) {
    Bytes seed = {flags, static_cast<uint8_t>(images.size()), 0};
    seed.insert(seed.end(), images.begin(), images.end());
    seed.insert(seed.end(), labels.begin(), labels.end());
    seeds.push_back(std::move(seed));
  }
  return seeds;
}

}  // namespace

const Target kGzip{"gzip", run_gzip, gzip_seeds};
const Target kIdx{"idx", run_idx, idx_seeds};

}  // namespace distrain::fuzz
