#include "distrain/store/gzip_reader.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <zlib.h>

namespace distrain::store {

GzipReader::GzipReader(const std::string& path, Limit limit, InputFile::Kind kind)
    : file_(path, kind),
      limit_(std::move(limit)),
      left_(limit_.bytes),
      stream_(std::make_unique<z_stream_s>()) {
  stream_->next_in = input_.data();
  stream_->avail_in = static_cast<uInt>(file_.read(input_.data(), 2));
  gzip_ = stream_->avail_in == 2 && input_[0] == 0x1F && input_[1] == 0x8B;
  constexpr int kGzipOnly = 16 + MAX_WBITS;
  if (gzip_ && inflateInit2(stream_.get(), kGzipOnly) != Z_OK) throw std::bad_alloc();
}

GzipReader::~GzipReader() {
  if (gzip_) inflateEnd(stream_.get());
}

void GzipReader::limit(Limit limit) {
  limit_ = std::move(limit);
  left_ = limit_.bytes;
}

size_t GzipReader::read(uint8_t* out, size_t bytes) {
  const size_t allowed = std::min<uint64_t>(bytes, left_);
  const size_t done = read_some(out, allowed);
  left_ -= done;
  uint8_t more;
  if (done == allowed && allowed < bytes && read_some(&more, 1) > 0) {
    base::bad_data(file_.path() + ": longer than the " + std::to_string(limit_.bytes) + " bytes " +
                   limit_.whose);
  }
  return done;
}

size_t GzipReader::read_some(uint8_t* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    if (stream_->avail_in == 0) {
      stream_->next_in = input_.data();
      stream_->avail_in = static_cast<uInt>(file_.read_some(input_.data(), input_.size()));
    }
    if (stream_->avail_in == 0) {
      if (gzip_ && !between_members_) base::bad_data(file_.path() + ": the gzip file is cut short");
      break;
    }
    done += inflate_some(out + done, bytes - done);
  }
  return done;
}

size_t GzipReader::inflate_some(uint8_t* out, size_t bytes) {
  const auto room = static_cast<uInt>(std::min<size_t>(bytes, 1 << 30));
  if (!gzip_) {
    const uInt count = std::min(room, stream_->avail_in);
    std::memcpy(out, stream_->next_in, count);
    stream_->next_in += count;
    stream_->avail_in -= count;
    return count;
  }
  if (between_members_) {
    inflateReset(stream_.get());
    between_members_ = false;
  }
  stream_->next_out = out;
  stream_->avail_out = room;
  const int result = inflate(stream_.get(), Z_NO_FLUSH);
  if (result == Z_MEM_ERROR) throw std::bad_alloc();
  if (result == Z_STREAM_END) {
    between_members_ = true;
  } else if (result != Z_OK && result != Z_BUF_ERROR) {
    base::bad_data(file_.path() + ": the gzip file is damaged");
  }
  return room - stream_->avail_out;
}

}  // namespace distrain::store
