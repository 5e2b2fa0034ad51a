// Shared helpers of the tests of readers and checkpoints.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/error.h"
#include "support/catch.h"

namespace distrain::testing {

/// Returns the message of the error that `call` throws. The test fails unless its kind is `kind`.
template <class F>
std::string error_of(base::ErrorKind kind, F call) {
  try {
    call();
  } catch (const base::Exception& exception) {
    CHECK(base::kind_name(exception.kind()) == base::kind_name(kind));
    return exception.error().message;
  }
  FAIL("no error");
  return {};
}

template <class F>
std::string bad_data(F call) {
  return error_of(base::ErrorKind::kBadData, call);
}

/// Returns the elements of an int64 tensor in row-major order.
inline std::vector<int64_t> ints(const at::Tensor& tensor) {
  const auto* first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/distrain_data_XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  std::string path(const std::string& file) const { return path_ + "/" + file; }
  std::string write(const std::string& file, std::string_view text) const {
    write_text(path(file), text);
    return path(file);
  }

 private:
  std::string path_;
};

}  // namespace distrain::testing
