// The only translation unit that compiles Catch2 itself.
#include <cstdio>

#if DISTRAIN_CATCH2_MAJOR >= 3
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  // Line buffering: the output of a program that CTest kills shows its progress.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  return Catch::Session().run(argc, argv);
}
