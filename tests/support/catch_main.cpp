// The only unit that compiles Catch2 itself.
#include <cstdio>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  // Whole lines at once: a program that CTest kills has told how far it came.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  return Catch::Session().run(argc, argv);
}
