// Runs a command line in this process and captures what it prints.
#pragma once

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <unistd.h>

#include "../src/app/program.h"
#include "distrain/base/clock.h"
#include "support/catch.h"

namespace distrain::testing {

using job::Json;

/// Returns what `call` writes to file descriptor `stream`, which is standard output or error.
template <class F>
std::string written_to(int stream, F call) {
  std::cout.flush();
  std::FILE* file = std::tmpfile();
  const int kept = dup(stream);
  dup2(fileno(file), stream);
  call();
  dup2(kept, stream);
  close(kept);
  std::string text(static_cast<size_t>(lseek(fileno(file), 0, SEEK_END)), '\0');
  CHECK(pread(fileno(file), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  std::fclose(file);
  return text;
}

/// Checks that a command line is refused before any rank starts, with an error that contains
/// `told`.
inline void check_refused(const app::JobCommand& command, const std::vector<std::string>& arguments,
                          const std::string& told) {
  CAPTURE(command.name, arguments, told);
  int code = 0;
  std::string errors;
  const std::string output = written_to(STDOUT_FILENO, [&] {
    errors = written_to(STDERR_FILENO, [&] {
      code = app::run_job_command(command, arguments, base::Clock::now());
    });
  });
  CHECK(code == 2);
  const size_t first = output.find('\n') + 1;
  const Json error = Json::parse(output.substr(0, first)), end = Json::parse(output.substr(first));
  CHECK(error["event"] == "error");
  CHECK(end["event"] == "end");
  const std::string message = error["message"];
  CHECK(message.find(told) != std::string::npos);
  CHECK(errors.ends_with(": " + message + '\n'));
  CHECK(errors.find('\n') == errors.size() - 1);
  CHECK(end["message"] == error["message"]);
  for (const Json& line : {error, end}) {
    CHECK(line["v"] == 1);
    CHECK(line["exit_code"] == 2);
    CHECK(line["kind"] == "invalid");
  }
}

using Words = std::vector<std::string>;

/// Arguments that must be refused, and a part of the error message.
struct Refused {
  Words arguments;
  std::string told;
};

inline void check_all_refused(const app::JobCommand& command, const std::vector<Refused>& all) {
  for (const Refused& line : all) check_refused(command, line.arguments, line.told);
}

}  // namespace distrain::testing
