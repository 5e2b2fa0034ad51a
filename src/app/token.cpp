#include <cstdlib>

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/net/socket.h"
#include "options.h"

namespace distrain::app {
namespace {

constexpr char kVariable[] = "DISTRAIN_TOKEN";
constexpr size_t kShortest = 16;
constexpr size_t kLongest = 4096;
constexpr char kHowToMake[] =
    "make one with `(umask 077; head -c 32 /dev/urandom | base64 > job.token)`";

/// Strips white space around `text`, such as the last newline. Throws `invalid` if it is too short.
std::string checked(const std::string& text, const std::string& where) {
  constexpr char kSpace[] = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  const std::string token = begin == std::string::npos
                                ? ""
                                : text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
  if (token.size() >= kShortest) return token;
  invalid("{}: a token has at least {} characters; {}", where, kShortest, kHowToMake);
}

std::string read_token(const std::string& path) {
  const std::string where = "--token-file " + path;
  const net::Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    const char* why = strerror(errno);
    invalid("{}: {}{}{}", where, why, errno == ENOENT ? "; " : "",
            errno == ENOENT ? kHowToMake : "");
  }
  if (!S_ISREG(info.st_mode)) invalid(where + ": is not a file");
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    throw base::Exception(base::ErrorKind::kAuth, where + ": belongs to another user");
  }
  if ((info.st_mode & 077) != 0) {
    throw base::Exception(
        base::ErrorKind::kAuth,
        fmt::format("{}: others may read or change it; chmod 600 {}", where, path));
  }
  std::string text(kLongest + 1, '\0');
  const ssize_t size = read(file.get(), text.data(), text.size());
  if (size < 0) invalid("{}: {}", where, strerror(errno));
  if (static_cast<size_t>(size) > kLongest) {
    invalid("{}: a token has at most {} bytes", where, kLongest);
  }
  text.resize(static_cast<size_t>(size));
  return checked(text, where);
}

}  // namespace

std::string take_token(const ParsedOptions& options, Placement& placement) {
  const char* const variable = std::getenv(kVariable);
  const std::string in_environment = variable ? variable : "";
  unsetenv(kVariable);  // child processes must not inherit it
  if (options.given("token-file")) {
    if (options.flag("insecure")) invalid("--token-file excludes --insecure");
    return read_token(options.text("token-file"));
  }
  if (in_environment.empty() || placement.mode == Placement::Mode::kLocal) return {};
  if (options.flag("insecure")) {
    placement.warn(fmt::format("--insecure overrides {} of the environment", kVariable));
    return {};
  }
  std::string token = checked(in_environment, kVariable);
  placement.warn(fmt::format(
      "{}: root and other processes of this user can read it; --token-file is safer", kVariable));
  return token;
}

}  // namespace distrain::app
