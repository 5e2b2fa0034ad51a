#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "distrain/net/socket.h"

namespace distrain::store {

/// Makes the system calls of a save, and calls a probe before each. Unless stated otherwise,
/// failures throw `resources` with path and reason.
class Disk {
 public:
  using Probe = std::function<void(const char* name)>;
  explicit Disk(Probe before_system_call = {}) : probe_(std::move(before_system_call)) {}
  Disk(const Disk&) = delete;

  /// Returns the result of `function`; -1 means failure, with errno. Retries if interrupted.
  auto call(const char* name, auto function) const {
    for (;;) {
      if (probe_) probe_(name);
      const auto result = function();
      if (result >= 0 || errno != EINTR) return result;
    }
  }

  [[noreturn]] static void fail(const char* what, const std::string& path);

 private:
  const Probe probe_;
};

/// A new file. Its content is on disk only after finish().
class OutputFile {
 public:
  /// `name` is relative to the open `folder`, which may be AT_FDCWD. Error messages show `path`.
  OutputFile(const Disk& disk, int folder, const std::string& name, std::string path);

  void write(std::span<const uint8_t> bytes);
  /// Syncs the file to disk and closes it.
  void finish();

 private:
  const Disk& disk_;
  const std::string path_;
  net::Fd fd_;
};

}  // namespace distrain::store
