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

TEST_CASE("a number of bytes may have a decimal or a binary unit") {
  CHECK(byte_count("0") == 0);
  CHECK(byte_count("512") == 512);
  CHECK(byte_count("256MB") == 256'000'000);
  CHECK(byte_count("3KiB") == 3072);
  CHECK(byte_count("2GiB") == int64_t{2} << 30);
  CHECK(byte_count("8TB") == 8'000'000'000'000);
  for (const char* text : {"", "MB", "-1", "1.5GB", "1 MB", "1M", "1XB", "1MBs", "99999999TB"}) {
    CAPTURE(text);
    CHECK_FALSE(byte_count(text));
  }
}

TEST_CASE("a time may have a unit, and is the nearest number of seconds") {
  CHECK(duration("60") == 60.0);
  CHECK(duration("60s") == 60.0);
  CHECK(duration("1.5s") == 1.5);
  CHECK(duration("5m") == 300.0);
  CHECK(duration("2h") == 7200.0);
  for (int i = 1; i < 1000; ++i) {
    CHECK(duration(std::to_string(i) + "ms") == number<double>(std::to_string(i) + "e-3"));
    CHECK(duration(std::to_string(i) + "us") == number<double>(std::to_string(i) + "e-6"));
  }
  for (const char* text : {"", "s", "ms", "5x", "5 s", "5S", "1h30m", "5sm", "m5", "0x5s"}) {
    CAPTURE(text);
    CHECK_FALSE(duration(text));
  }
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
