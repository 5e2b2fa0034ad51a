// Tests the lines and the bar that a Display prints for the events of a job.
#include <string>

#include "../src/app/process/display.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::app;
using Mode = DisplayPlan::Mode;

namespace {

/// A display whose screen is a string, on a clock that the test moves.
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
    display_.on_line(json);
  }
  /// Returns the text that the display has written since the last call.
  std::string take() { return std::exchange(text_, {}); }
  /// The live region's first line as it was drawn last.
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
  Json json{{"event", "progress"}, {"rank", rank},   {"role", "trainer" + std::to_string(rank)},
            {"epoch", epoch},      {"epochs", 3},    {"step", step},
            {"steps", steps},      {"loss", 0.4821}, {"trainers", trainers}};
  return json.dump();
}

DisplayPlan plan(Mode mode) {
  DisplayPlan plan;
  plan.mode = mode;
  plan.header = "ps  header";
  return plan;
}

}  // namespace

TEST_CASE("the bar counts the steps of all trainers") {
  Shown shown(plan(Mode::kFull));
  CHECK(shown.bar() == "starting  0:00");
  shown.event(progress(1, 1, 100));
  CHECK(shown.bar() == "epoch 1/3  [....................]   1 %  1/100  loss 0.4821  0:00");
  shown.pass(10);
  shown.event(progress(1, 50, 100));
  CHECK(shown.bar() ==
        "epoch 1/3  [#########..........]  50 %  50/100  loss 0.4821  4.8/s  0:10<0:10");
}

TEST_CASE("narrow terminals lose the bar first and the loss never") {
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

TEST_CASE("several trainers have a line that says who is slow, lost and back") {
  Shown shown(plan(Mode::kFull));
  shown.event(progress(1, 20, 100, 1, 2));
  shown.event(progress(2, 10, 100, 1, 2));
  CHECK(shown.bar() == "trainer1 20 0.0/s    trainer2 10 0.0/s");
  shown.event(
      R"({"event":"lost","lost_rank":2,"lost_role":"trainer2","cause":"gone","steps_back":3,)"
      R"("trainers_left":1})");
  const std::string text = shown.take();
  CHECK(text.find("warn: trainer2 lost (gone); 3 steps go to others, 1 trainer left\n") !=
        text.npos);
  CHECK(text.ends_with("trainer1 20 0.0/s    trainer2 lost at step 10"));
  CHECK(text.find("30/200") != text.npos);
  shown.event(R"({"event":"returned","returned_rank":2,"returned_role":"trainer2"})");
  CHECK(shown.take().find("trainer2 is back\n") != std::string::npos);
}

TEST_CASE("an epoch's line has the mean of its trainers and its evaluation") {
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
  SECTION("without") {
    shown.event(progress(1, 31, 30, 2));
    CHECK(shown.take() == " epoch 1/3  loss 1.2500  1.50 s\n");
  }
  SECTION("the last one") {
    shown.display_.finish({{"status", "ok"}, {"steps", 40}, {"wall_s", 2}, {"loss", 1.25}});
    CHECK(shown.take() ==
          " epoch 1/3  loss 1.2500  1.50 s\ndone: 40 steps in 2.00 s, loss 1.2500\n");
  }
}

TEST_CASE("a window that gets narrower leaves no residue") {
  Shown shown(plan(Mode::kFull));
  shown.event(progress(1, 20, 30));
  shown.take();
  shown.columns_ = 30;  // the terminal wraps the line of 64 columns
  shown.event(progress(1, 21, 30));
  CHECK(shown.take().starts_with("\r\x1b[2A\x1b[J"));
}

TEST_CASE("nothing is written in the background, and lines wait") {
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

TEST_CASE("whole lines have one of progress each 30 s") {
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

TEST_CASE("a job that a signal ends tells what is saved and how to go on") {
  DisplayPlan to_go_on = plan(Mode::kLines);
  const Json end{{"status", "failed"}, {"kind", "cancelled"}, {"signal", "SIGINT"}, {"steps", 7}};
  SECTION("without --checkpoint") {
    Shown shown(to_go_on);
    shown.take();
    CHECK(shown.display_.tells_signal(end));
    shown.display_.finish(end);
    CHECK(shown.take() == "nothing saved: no --checkpoint; 7 steps\n");
  }
  to_go_on.to_go_on = "distrain ps --checkpoint run1 --resume auto";
  Shown shown(to_go_on);
  shown.take();
  SECTION("with one") {
    shown.event(
        R"({"event":"checkpoint","action":"saved","path":"run1/x","step":7,"wall_s":0.01})");
    CHECK(shown.take() == " saved run1/x  0.01 s\n");
    shown.display_.finish(end);
    CHECK(shown.take() ==
          "saved run1/x, step 7; to go on:\n  distrain ps --checkpoint run1 --resume auto\n");
  }
  SECTION("before the first save") {
    shown.display_.finish(end);
    CHECK(shown.take() == "nothing saved yet; 7 steps\n");
  }
}

TEST_CASE("where JSON lines go to the terminal, only warnings and one hint are added") {
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
