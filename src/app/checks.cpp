#include "distrain/app/checks.h"

#include <errno.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/data/trace_file.h"

namespace distrain::app {
namespace {

[[noreturn]] void bad_data(const char* name, const std::string& path, const char* why) {
  throw base::Exception(base::ErrorKind::kBadData, fmt::format("--{} {}: {}", name, path, why));
}

/// What is at the option's path, which must be readable.
struct stat look_at(const char* name, const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || access(path.c_str(), R_OK) != 0) {
    bad_data(name, path, strerror(errno));
  }
  return info;
}

[[noreturn]] void needs(const std::string& what, const char* needed) {
  throw base::Exception(base::ErrorKind::kInvalid, fmt::format("--{} needs --{}", what, needed));
}

}  // namespace

void check_file(const ParsedOptions& options, const char* name) {
  const std::string path = options.text(name);
  if (path.empty()) return;
  const struct stat info = look_at(name, path);
  if (S_ISDIR(info.st_mode)) bad_data(name, path, "is a directory");
  if (S_ISREG(info.st_mode) && info.st_size == 0) bad_data(name, path, "the file is empty");
}

void check_folder(const ParsedOptions& options, const char* name) {
  const std::string path = options.text(name);
  if (path.empty()) return;
  if (!S_ISDIR(look_at(name, path).st_mode)) bad_data(name, path, "is not a directory");
}

void check_needs(const ParsedOptions& options, const char* name, const char* needed) {
  const bool is_there = options.decided(needed) && !options.text(needed).empty();
  if (options.given(name) && !is_there) needs(name, needed);
}

void check_checkpoint(const ParsedOptions& options, const Placement& placement) {
  if (!placement.has_rank_0()) return;
  const std::string resume = options.text("resume");
  if (resume == "auto") {
    if (!options.given("checkpoint")) needs("resume auto", "checkpoint");
  } else if (!resume.empty()) {
    check_folder(options, "resume");
  }
}

void check_trace(const ParsedOptions& options, const Placement& placement) {
  if (!options.given("trace") || !placement.has_rank_0()) return;
  try {
    data::check_trace_path(options.text("trace"));
  } catch (const base::Exception& e) {
    throw base::Exception(e.kind(), "--trace: " + e.error().message);
  }
}

}  // namespace distrain::app
