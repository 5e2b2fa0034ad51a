// Tests the lines and the progress bar that a Display prints for the events of a job.
#include <algorithm>
#include <string>

#include "../src/app/process/display.h"
#include "../src/app/process/output.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::app;
using Mode = DisplayPlan::Mode;

namespace {

/// A display that writes to a string and reads a clock that the test sets.
struct Shown {
  explicit Shown(DisplayPlan plan, size_t columns = 80)
      : columns_(columns), display_(std::move(plan), screen()) {
    display_.begin();
  }

  Screen screen() {
    Screen screen;
    screen.write = [this](const std::string& text) { text_ += text; };
    screen.is_free = [this] { return is_free_; };
    screen.width = [this] { return columns_; };
    screen.now = [this] { return now_; };
    return screen;
  }

  void pass(int seconds) { now_ += std::chrono::seconds(seconds); }
  void event(const std::string& json) {
    now_ += std::chrono::milliseconds(200);
    display_.on_event(Json::parse(json));
  }
  /// Returns the text that the display has written since the last call.
  std::string take() { return std::exchange(text_, {}); }
  /// Returns the first line of the progress bar as it was last drawn.
  std::string bar() {
    std::string text = take();
    const size_t at = text.rfind("\x1b[J");
    text = at == text.npos ? text : text.substr(at + 3);
    return text.substr(text.rfind('\n') == text.npos ? 0 : text.rfind('\n') + 1);
  }

  size_t columns_;
  bool is_free_ = true;
  std::string text_;
  base::TimePoint now_ = base::TimePoint(std::chrono::hours(1));
  Display display_;
};

std::string progress(int rank, int step, int steps, int epoch = 1, int trainers = 1) {
  Json json{{"event", "progress"},  {"rank", rank},   {"role", "trainer" + std::to_string(rank)},
            {"epoch", epoch},       {"epochs", 3},    {"step", step},
            {"steps", steps},       {"loss", 0.4821}, {"trainers", trainers},
            {"processes", trainers}};
  return json.dump();
}

DisplayPlan plan(Mode mode) {
  DisplayPlan plan;
  plan.mode = mode;
  plan.header = "ps  header";
  return plan;
}

}  // namespace

TEST_CASE("the waiting line names the missing ranks and the reason") {
  const std::string rank_0 = R"({"event": "waiting", "rank": 0, "missing": [1, 3], "address": "a:1",
                                 "reason": "refused rank 1"})";
  const std::string rank_2 = R"({"event": "waiting", "rank": 2, "missing": [0], "address": "a:1",
                                 "reason": "nobody there"})";
  Shown lines(plan(Mode::kLines));
  lines.take();
  lines.pass(5);
  lines.event(rank_2);
  CHECK(lines.take() == "waiting for rank 0 at a:1 (5 s): nobody there\n");
  lines.event(rank_0);
  CHECK(lines.take() == "waiting for ranks 1,3 at a:1 (5 s): refused rank 1\n");
  lines.event(rank_2);  // ignored: rank 0 has reported all missing ranks
  lines.event(rank_0);
  CHECK(lines.take().empty());
}

TEST_CASE("a header is broken at separators and between words if the terminal is too narrow") {
  DisplayPlan wide = plan(Mode::kLines);
  wide.header =
      "hybrid  master, ps, 2 trainers, async  -  random labels: nothing can be learned"
      "  -  run 0123abcd";
  CHECK(Shown(wide, 40).take() == wide.header + '\n');  // output is not a terminal
  wide.on_terminal = true;
  CHECK(Shown(wide, 96).take() == wide.header + '\n');
  CHECK(Shown(wide, 95).take() ==
        "hybrid  master, ps, 2 trainers, async  -  random labels: nothing can be learned\n"
        "  run 0123abcd\n");
  CHECK(Shown(wide, 40).take() ==
        "hybrid  master, ps, 2 trainers, async\n"
        "  random labels: nothing can be learned\n"
        "  run 0123abcd\n");
  CHECK(Shown(wide, 30).take() ==
        "hybrid  master, ps, 2\n"
        "  trainers, async\n"
        "  random labels: nothing can\n"
        "  be learned  -  run 0123abcd\n");
  CHECK(Shown(wide, 1).take().ends_with("\n  run\n  0123abcd\n"));
  wide.header = "ps  /a/long/folder/without/a/space  -  run 0123abcd";
  CHECK(Shown(wide, 20).take() == "ps\n  /a/long/folder/without/a/space\n  run 0123abcd\n");
}

TEST_CASE("a narrow terminal shows the episode, loss and reward of a reinforcement learning job") {
  const std::string event =
      R"({"event":"progress","rank":1,"step":1234,"steps":9,"running_reward":123.25,"loss":0.5})";
  Shown wide(plan(Mode::kFull));
  wide.event(event);
  CHECK(wide.bar() == "episode 1234  loss 0.50  reward 123.2  0:00");
  Shown narrow(plan(Mode::kFull), 40);
  narrow.event(event);
  CHECK(narrow.bar() == "episode 1234  loss 0.50  reward 123.2");
}

TEST_CASE("the bar counts the steps of each trainer") {
  Shown shown(plan(Mode::kFull));
  CHECK(shown.bar() == "starting  0:00");
  shown.event(progress(1, 1, 100));
  CHECK(shown.bar() == "epoch 1/3  [....................]   1 %  1/100  loss 0.4821  0:00");
  shown.pass(10);
  shown.event(progress(1, 50, 100));
  CHECK(shown.bar() ==
        "epoch 1/3  [#########..........]  50 %  50/100  loss 0.4821  4.8/s  0:10<0:10");
  shown.event(progress(2, 10, 100, 1, 2));
  CHECK(shown.take().find("30 %  30/100") != std::string::npos);
}

TEST_CASE("narrow terminals drop the bar first and never the loss") {
  const size_t columns = GENERATE(70, 60, 50, 40, 20, 11, 5);
  Shown shown(plan(Mode::kFull), columns);
  shown.event(progress(1, 1, 100));
  shown.pass(10);
  shown.event(progress(1, 50, 100));
  const std::string bar = shown.bar();
  CAPTURE(columns, bar);
  CHECK(bar.size() < columns);
  if (columns > 11) CHECK(bar.find("loss 0.4821") != bar.npos);
  if (columns <= 60) CHECK(bar.find('[') == bar.npos);
  if (columns == 40) CHECK(bar == "epoch 1/3  50 %  50/100  loss 0.4821");
}

TEST_CASE("the line of several trainers names slow, lost and restarted trainers") {
  Shown shown(plan(Mode::kFull));
  shown.event(progress(1, 20, 100, 1, 2));
  shown.event(progress(2, 10, 100, 1, 2));
  CHECK(shown.bar() == "trainer1 20    trainer2 10");
  shown.event(R"({"event":"lost","lost_rank":2,"lost_role":"trainer2","steps_back":1,)"
              R"("cause":"rank 2 (trainer2) is lost: gone","trainers_left":1})");
  const std::string text = shown.take();
  CHECK(text.find("warn: trainer2 lost (gone); others take over 1 step, 1 trainer left\n") !=
        text.npos);
  CHECK(text.ends_with("trainer1 20    trainer2 lost at step 10"));
  CHECK(text.find("15/100") != text.npos);
  shown.columns_ = 40;  // too narrow for the state of each trainer: lost ones come first
  shown.event(progress(1, 21, 100, 1, 2));
  CHECK(shown.bar() == "lost trainer2  slowest trainer1 21");
  shown.columns_ = 80;
  shown.event(R"({"event":"returned","returned_rank":2,"returned_role":"trainer2"})");
  CHECK(shown.take().find("trainer2 is back\n") != std::string::npos);
}

TEST_CASE("restarting a trainer keeps the display of the job; restarting all ranks resets it") {
  Shown shown(plan(Mode::kFull));
  shown.event(progress(1, 20, 100, 2, 2));
  shown.event(progress(2, 10, 100, 2, 2));
  shown.event(R"({"event":"lost","lost_rank":2,"lost_role":"trainer2","cause":"gone"})");
  shown.event(R"({"event":"restart","ranks":[2]})");
  shown.event(progress(1, 21, 100, 2, 2));
  CHECK(shown.bar() == "trainer1 21    trainer2 lost at step 10");
  shown.event(R"({"event":"epoch","rank":1,"epoch":1,"loss":8,"steps":1})");
  shown.event(R"({"event":"restart","ranks":[0,1,2]})");
  shown.take();
  shown.event(R"({"event":"epoch","rank":1,"epoch":1,"loss":2,"steps":1})");
  shown.event(progress(1, 1, 100, 2));
  CHECK(shown.take().find(" epoch 1/3  loss 2.0000") != std::string::npos);
}

TEST_CASE("the line of an epoch has the mean over its trainers and its evaluation") {
  Shown shown(plan(Mode::kLines));
  CHECK(shown.take() == "ps  header\n");
  shown.event(progress(1, 20, 30));
  shown.event(progress(2, 20, 30));
  shown.event(R"({"event":"epoch","rank":1,"epoch":1,"loss":2.0,"steps":10,"wall_s":1.5})");
  CHECK(shown.take().empty());
  shown.event(R"({"event":"epoch","rank":2,"epoch":1,"loss":1.0,"steps":30,"wall_s":1.25})");
  SECTION("with an evaluation") {
    shown.event(R"({"event":"eval","set":"valid","epoch":1,"loss":0.5,"accuracy":0.86})");
    CHECK(shown.take() == " epoch 1/3  loss 1.2500  valid 0.5000  accuracy 86.00 %  1.50 s\n");
  }
  SECTION("without an evaluation") {
    shown.event(progress(1, 31, 30, 2));
    CHECK(shown.take() == " epoch 1/3  loss 1.2500  1.50 s\n");
  }
  SECTION("with the job's own metrics instead of an accuracy") {
    shown.event(R"({"event":"eval","rank":0,"set":"valid","epoch":1,"step":20,"loss":0.5,)"
                R"("samples":9,"abs_error":0.123456})");
    CHECK(shown.take() == " epoch 1/3  loss 1.2500  valid 0.5000  abs_error 0.1235  1.50 s\n");
    shown.display_.finish(
        {{"status", "ok"}, {"steps", 40}, {"eval", {{"loss", 0.5}, {"abs_error", 0.123456}}}});
    CHECK(shown.take() == "done: 40 steps, loss 0.4821, abs_error 0.1235\n");
  }
  SECTION("the last epoch") {
    shown.display_.finish({{"status", "ok"}, {"steps", 40}, {"wall_s", 2}, {"loss", 1.25}});
    CHECK(shown.take() ==
          " epoch 1/3  loss 1.2500  1.50 s\ndone: 40 steps in 2.00 s, loss 1.2500\n");
  }
}

TEST_CASE("a loss that is not a number is shown as such, although JSON has it as null") {
  Shown shown(plan(Mode::kLines));
  shown.take();
  shown.event(R"({"event":"epoch","rank":1,"epoch":1,"loss":null,"steps":10,"wall_s":1.5})");
  shown.event(R"({"event":"eval","rank":0,"set":"valid","epoch":1,"loss":null,"accuracy":0.1})");
  CHECK(shown.take() == " epoch 1  loss nan  valid nan  accuracy 10.00 %  1.50 s\n");
}

TEST_CASE("the line of an epoch that the job ended early has the steps of each trainer") {
  Shown shown(plan(Mode::kLines));
  shown.event(progress(1, 5, 30));
  shown.take();
  for (int rank = 1; rank < 3; ++rank) {
    shown.event(R"({"event":"epoch","rank":)" + std::to_string(rank) +
                R"(,"epoch":1,"loss":2.0,"steps":10,"wall_s":1.5,"partial":true})");
  }
  shown.display_.finish({{"status", "ok"}, {"steps", 20}});
  CHECK(shown.take() ==
        " 10 steps of epoch 1/3  loss 2.0000  1.50 s\ndone: 20 steps, loss 0.4821\n");
}

TEST_CASE("lines of short epochs and of their checkpoints are thinned, except the last ones") {
  Shown shown(plan(Mode::kLines));
  shown.take();
  std::string text;
  for (int epoch = 1; epoch <= 100; ++epoch) {  // one epoch each 0.4 s
    const std::string number = std::to_string(epoch);
    shown.event(R"({"event":"epoch","rank":1,"epoch":)" + number + R"(,"loss":2,"steps":1})");
    shown.event(R"({"event":"checkpoint","action":"saved","path":"x/)" + number + "\"}");
    text += shown.take();
  }
  const auto lines = [&text] { return std::ranges::count(text, '\n'); };
  CHECK(text.find("epoch 20  ") != text.npos);
  CHECK(text.find("epoch 21  ") == text.npos);
  CHECK(lines() < 2 * (20 + 80 * 2 / 5 + 2));
  shown.display_.finish({{"status", "ok"}});
  text += shown.take();
  CHECK(text.find("epoch 100  ") != text.npos);
  CHECK(text.find(" saved x/100  ") != text.npos);
}

TEST_CASE("the line of the last epoch comes before the test's line") {
  Shown shown(plan(Mode::kLines));
  for (int epoch = 1; epoch <= 30; ++epoch) {
    shown.event(R"({"event":"epoch","rank":1,"epoch":)" + std::to_string(epoch) +
                R"(,"loss":2,"steps":1})");
  }
  shown.event(R"({"event":"eval","set":"test","loss":3})");
  const std::string text = shown.take();
  CHECK(text.find(" epoch 30  ") < text.find(" test 3.0000"));
}

TEST_CASE("a waiting line shows its ranks first, then as much of its reason as fits") {
  const std::string event =
      R"({"event":"waiting","missing":[1,2],"address":"node1:29500","reason":"no route to host"})";
  Shown wide(plan(Mode::kFull));
  wide.event(event);
  CHECK(wide.bar() == "waiting for ranks 1,2 at node1:29500 (0 s): no route to host");
  Shown narrow(plan(Mode::kFull), 40);
  narrow.event(event);
  CHECK(narrow.bar() == "waiting for ranks 1,2 (0 s): no ...");
}

TEST_CASE("a warning names its rank unless the job has only one rank") {
  Shown shown(plan(Mode::kLines));
  shown.take();
  shown.event(R"({"event":"warn","rank":2,"role":"trainer2","message":"look out"})");
  shown.event(R"({"event":"warn","rank":1,"role":"trainer1","message":"look out"})");
  shown.event(R"({"event":"warn","rank":1,"role":"trainer1","message":"rank 1 is slow"})");
  shown.event(R"({"event":"warn","rank":0,"role":"local","message":"alone"})");
  CHECK(shown.take() == "warn: rank 2 (trainer2): look out\nwarn: rank 1 is slow\nwarn: alone\n");
  Cause cause{.rank = 1, .role = "trainer1", .kind = "internal", .message = "out of range"};
  CHECK(message_of(cause) == "rank 1 (trainer1): out of range");
  cause.kind = kGoalNotReached;
  CHECK(message_of(cause) == "out of range");
  cause = {.rank = 1, .role = "trainer1", .kind = "internal", .message = "no answer of rank 12"};
  CHECK(message_of(cause) == "rank 1 (trainer1): no answer of rank 12");
}

TEST_CASE("numbers of a prediction are shown with 4 digits") {
  DisplayPlan pretty = plan(Mode::kLines);
  pretty.pretty = true;
  Shown shown(pretty);
  shown.take();
  shown.event(R"({"event":"prediction","rank":0,"index":3,"scores":[0.12345678901234567,1e-9]})");
  CHECK(shown.take() == "  index 3  scores [0.1235, 1e-09]\n");
}

TEST_CASE("a window that becomes narrower leaves no residue") {
  Shown shown(plan(Mode::kFull));
  shown.event(progress(1, 20, 30));
  shown.take();
  shown.columns_ = 30;  // the terminal wraps the line, which has 64 columns
  shown.event(progress(1, 21, 30));
  CHECK(shown.take().starts_with("\r\x1b[2A\x1b[J"));
}

TEST_CASE("nothing is written while the job is in the background, and lines are kept for later") {
  Shown shown(plan(Mode::kFull));
  shown.take();
  shown.is_free_ = false;
  shown.event(R"({"event":"warn","message":"look out"})");
  shown.event(progress(1, 20, 30));
  shown.display_.tick();
  CHECK(shown.take().empty());
  shown.is_free_ = true;
  shown.pass(2);
  shown.display_.tick();
  CHECK(shown.take().find("warn: look out\n") != std::string::npos);
}

TEST_CASE("output without a bar has a progress line each 30 s") {
  Shown shown(plan(Mode::kLines));
  shown.event(progress(1, 15, 30));
  shown.take();
  shown.pass(29);
  shown.display_.tick();
  CHECK(shown.take().empty());
  shown.pass(2);
  shown.display_.tick();
  CHECK(shown.take().find("50 %  15/30  loss 0.4821") != std::string::npos);
  CHECK(shown.display_.next_tick() == shown.now_ + std::chrono::seconds(30));
}

TEST_CASE("a job that a signal ends prints what is saved and how to resume") {
  DisplayPlan to_go_on = plan(Mode::kLines);
  const Json end{{"status", "failed"}, {"kind", "cancelled"}, {"signal", "SIGINT"}, {"steps", 7}};
  SECTION("without --checkpoint") {
    Shown shown(to_go_on);
    shown.take();
    shown.display_.finish(end);
    CHECK(shown.display_.is_told());
    CHECK(shown.take() == "nothing saved: no --checkpoint; 7 steps\n");
  }
  SECTION("while it waits for ranks") {
    to_go_on.mode = GENERATE(Mode::kLines, Mode::kWarnings);
    Shown shown(to_go_on);
    shown.event(R"({"event":"waiting","missing":[1,2],"address":"a:1","reason":"refused rank 1"})");
    shown.take();
    shown.pass(11);
    shown.display_.finish(end);
    CHECK(shown.take() ==
          "stopped while waiting for ranks 1,2 at a:1 (11 s): refused rank 1\n"
          "nothing saved: no --checkpoint; 7 steps\n");
  }
  SECTION("while a rank waits that cannot save") {
    to_go_on.has_rank_0 = false;
    to_go_on.address = "a:1";
    Shown shown(to_go_on);
    shown.take();
    shown.display_.finish(end);
    CHECK_FALSE(shown.display_.is_told());
    CHECK(shown.take() == "stopped while waiting for the other ranks at a:1 (0 s)\n");
  }
  SECTION("after it has met all ranks") {
    to_go_on.address = "a:1";
    Shown shown(to_go_on);
    shown.event(R"({"event":"ready","rank":0})");
    shown.take();
    shown.display_.finish(end);
    CHECK(shown.take() == "nothing saved: no --checkpoint; 7 steps\n");
  }
  SECTION("with the reward of a reinforcement learning job") {
    Shown shown(to_go_on);
    shown.event(R"({"event":"progress","rank":1,"step":3,"running_reward":2.25,"loss":0.5})");
    shown.take();
    shown.display_.finish(end);
    CHECK(shown.take() ==
          "nothing saved: no --checkpoint; 7 steps, loss 0.5000, running reward 2.2\n");
  }
  SECTION("with --pretty and stdout not a terminal, stderr has the text") {
    to_go_on.pretty = true;
    to_go_on.on_terminal = GENERATE(false, true);
    Shown shown(to_go_on);
    shown.display_.finish(end);
    CHECK(shown.display_.is_told() == to_go_on.on_terminal);
  }
  to_go_on.to_go_on = "distrain ps --checkpoint run1 --resume auto";
  Shown shown(to_go_on);
  shown.take();
  SECTION("with a checkpoint") {
    shown.event(
        R"({"event":"checkpoint","action":"saved","path":"run1/x","step":7,"wall_s":0.01})");
    CHECK(shown.take() == " saved run1/x  0.01 s\n");
    shown.display_.finish(end);
    CHECK(shown.take() ==
          "stopped: 7 steps; to go on:\n  distrain ps --checkpoint run1 --resume auto\n");
  }
  SECTION("with a checkpoint, and JSON lines on the same terminal") {
    to_go_on.mode = Mode::kWarnings;
    to_go_on.hint = true;
    Shown warnings(to_go_on);
    warnings.event(R"({"event":"checkpoint","action":"saved","path":"run1/x","wall_s":0.01})");
    CHECK(warnings.take().empty());
    warnings.display_.finish(end);
    CHECK(warnings.take() ==
          " saved run1/x  0.01 s\nstopped: 7 steps; to go on:\n"
          "  distrain ps --checkpoint run1 --resume auto\n");
  }
  SECTION("before the first checkpoint") {
    shown.display_.finish(end);
    CHECK(shown.take() == "nothing saved yet; 7 steps\n");
  }
}

TEST_CASE("when JSON lines go to the terminal, only warnings and one hint are added") {
  DisplayPlan warnings = plan(Mode::kWarnings);
  warnings.hint = true;
  Shown shown(warnings);
  shown.event(progress(1, 20, 30));
  shown.event(R"({"event":"epoch","rank":1,"epoch":1,"loss":2.0,"steps":10,"wall_s":1.5})");
  CHECK(shown.take().empty());
  for (int rank = 1; rank < 3; ++rank) shown.event(R"({"event":"warn","message":"look out"})");
  CHECK(shown.take() == "warn: look out\n");
  shown.display_.finish({{"status", "ok"}});
  CHECK(shown.take() == "hint: --pretty prints lines for people in place of JSON\n");
}
