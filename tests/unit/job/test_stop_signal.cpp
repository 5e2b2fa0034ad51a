#include <csignal>

#include "distrain/job/job.h"
#include "support/catch.h"

using namespace distrain;
using job::kSameSignal;
using job::StopSignal;

namespace {

const base::TimePoint kNow = base::Clock::now();
const base::TimePoint kSoon = kNow + kSameSignal / 2;
const base::TimePoint kLater = kNow + kSameSignal * 2;

}  // namespace

TEST_CASE("a signal ends a process whose job does not handle it") {
  StopSignal stop;
  CHECK_FALSE(stop.heeds(SIGTERM, kNow));
  CHECK_FALSE(stop.request());
  stop.arm();
  CHECK(stop.armed());
  stop.disarm(false);
  CHECK_FALSE(stop.heeds(SIGTERM, kNow));
  CHECK_FALSE(stop.requested());
  stop.arm();  // called late by another thread
  CHECK_FALSE(stop.armed());
  CHECK_FALSE(stop.heeds(SIGTERM, kNow));
}

TEST_CASE("a job that saves handles the first signal; the second one ends the process") {
  const int number = GENERATE(SIGINT, SIGTERM, SIGHUP);
  StopSignal stop;
  stop.arm();
  CHECK(stop.number() == 0);
  CHECK(stop.heeds(number, kNow));
  CHECK(stop.requested());
  CHECK(stop.heeds(number, kSoon));  // the same signal, sent to the process and to its group
  CHECK(stop.heeds(SIGHUP, kSoon));  // systemd sends SIGHUP with SIGTERM
  CHECK(stop.number() == number);
  CHECK_FALSE(stop.heeds(number, kLater));
  CHECK(stop.number() == number);
}

TEST_CASE("a rank that another rank told to stop may still receive its own signal") {
  StopSignal stop;
  stop.arm();
  CHECK(stop.request());
  CHECK_FALSE(stop.request());
  CHECK(stop.number() == 0);
  SECTION("during the save") {}
  SECTION("after the save") { stop.disarm(GENERATE(true, false)); }
  CHECK(stop.heeds(SIGINT, kLater));  // accepted at any later time
  CHECK(stop.number() == SIGINT);
  CHECK_FALSE(stop.heeds(SIGTERM, kLater + kSameSignal));
}

TEST_CASE("a rank that learns only at the end of a stop may still receive its own signal") {
  StopSignal stop;
  stop.arm();
  if (GENERATE(true, false)) stop.disarm(false);  // before the stop is known
  stop.disarm(true);
  CHECK(stop.requested());
  CHECK(stop.heeds(SIGTERM, kNow));
  CHECK(stop.heeds(SIGTERM, kSoon));
  CHECK_FALSE(stop.heeds(SIGTERM, kLater));
}
