#include "distrain/base/text.h"
#include "support/catch.h"

using namespace distrain::base;

TEST_CASE("a text is a number only if all of it is") {
  CHECK(number<int>("12") == 12);
  CHECK(number<int>("-1") == -1);
  CHECK(number<double>("5e-2") == 0.05);
  for (const char* text : {"", "x", "1x", " 1", "1 ", "99999999999"}) {
    CAPTURE(text);
    CHECK_FALSE(number<int>(text));
  }
  CHECK_FALSE(number<uint8_t>("-1"));
  CHECK_FALSE(number<uint8_t>("256"));
  CHECK(shortest(0.05) == "0.05");
  CHECK(shortest(1e6) == "1e+06");
}

TEST_CASE("a list is split at each comma") {
  using Parts = std::vector<std::string_view>;
  CHECK(split("a,b", ',') == Parts{"a", "b"});
  CHECK(split("a", ',') == Parts{"a"});
  CHECK(split("", ',') == Parts{""});
  CHECK(split(",a,", ',') == Parts{"", "a", ""});
}

TEST_CASE("a similar word is suggested") {
  const std::vector<std::string> words = {"adam", "adamw", "sgd"};
  CHECK(did_you_mean("adm", words) == "adam");
  CHECK(did_you_mean("sgdd", words) == "sgd");
  CHECK_FALSE(did_you_mean("lamb", words));
}
