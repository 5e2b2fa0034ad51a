#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "distrain/net/socket.h"

namespace distrain::data {

/// The system calls of saving that change something or say what is there, each told to a probe
/// before it is made. Failures are `resources` with path and reason, unless said otherwise.
class Disk {
 public:
  using Probe = std::function<void(const char* name)>;
  explicit Disk(Probe before_system_call = {}) : probe_(std::move(before_system_call)) {}
  Disk(const Disk&) = delete;

  /// What `function` gives back, -1 with errno for a failure; it is called again if interrupted.
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

/// A new file. Nothing is sure before finish().
class OutputFile {
 public:
  /// `name` is relative to the folder that is open as `folder`, or AT_FDCWD; messages have `path`.
  OutputFile(const Disk& disk, int folder, const std::string& name, std::string path);

  void write(std::span<const uint8_t> bytes);
  /// Waits until the file is on the disk, and closes it.
  void finish();

 private:
  const Disk& disk_;
  const std::string path_;
  net::Fd fd_;
};

}  // namespace distrain::data
