#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

class OutputQueue;

/// Output of a Display. No function waits for a reader.
struct Screen {
  std::function<void(std::string text)> write;
  /// Returns true if lines may be written now: otherwise they wait.
  std::function<bool()> is_free = [] { return true; };
  /// Returns true if a live region may be drawn now.
  std::function<bool()> may_draw = [] { return true; };
  std::function<size_t()> width = [] { return size_t{80}; };
  std::function<base::TimePoint()> now = base::Clock::now;
};

/// Settings of a Display, and facts that it needs before the first event.
struct DisplayPlan {
  enum class Mode {
    kNone,
    kWarnings,  ///< JSON lines go to the same terminal: warnings, losses and one hint
    kLines,     ///< whole lines only
    kFull,      ///< lines, and below them a live region with a bar
  };
  Mode mode = Mode::kNone;
  bool pretty = false;   ///< on stdout in place of JSON lines
  bool colours = false;  ///< of a terminal
  bool hint = false;     ///< kWarnings: names --pretty at the end of a job that ends well
  bool on_terminal = false;
  std::string header;   ///< the first line
  std::string address;  ///< of rank 0, if ranks start elsewhere
  bool has_rank_0 = true;
  std::string to_go_on;  ///< command line that resumes the job; empty: the job saves nothing
};

/// Returns stderr, or, where people read stdout, what writes the lines there. Whoever stops a
/// terminal (Ctrl-S) does not stop the writer.
Screen screen_of(const DisplayPlan& plan, OutputQueue& lines);

/// Chooses the mode by what stdout and stderr are. `progress`: auto, plain or none. `is_first`:
/// this process is rank 0 or runs all ranks; `is_leader`: nobody else of its group draws a bar.
DisplayPlan plan_display(const std::string& progress, bool pretty, bool is_first, bool is_leader);

/// Shows people how a job goes, by its events and those of EventSink::progress(): a header, lines
/// that stay, and a live region that is drawn anew at most 10 times a second. For one thread.
class Display {
 public:
  Display(DisplayPlan plan, Screen screen) : plan_(std::move(plan)), screen_(std::move(screen)) {}

  void begin();
  void on_event(const Json& event);
  /// Shows what changes by itself. To be called at next_tick(), which is kNever if nothing does.
  void tick();
  base::TimePoint next_tick() const;
  /// Removes the live region, so that other text can be written to the terminal.
  void clear();
  /// Shows how the job ended. Nothing more is shown then.
  void finish(const Json& end);
  /// Returns true if finish() has told people that a signal ended the job.
  bool is_told() const { return is_told_; }
  bool pretty() const { return plan_.pretty; }
  bool is_on() const { return plan_.mode != Mode::kNone; }

 private:
  using Mode = DisplayPlan::Mode;
  struct Trainer {
    std::string name = {};
    std::optional<int64_t> first;  // step of its first report
    int64_t step = 0, steps = 0;   // made, and to be made
    bool lost = false;
  };
  struct Epoch {
    std::set<int64_t> ranks;
    double loss = 0, steps = 0, seconds = 0;
    std::string evaluation;
    bool is_partial = false;
  };
  struct Thinned {  // lines of one kind
    int shown = 0;
    base::TimePoint at{};
    std::string held;  // the newest line, if it was not shown
  };

  void on_progress(const Json& event);
  int64_t count() const { return std::max<int64_t>(count_, std::ssize(trainers_)); }
  void stay(const std::string& line, const char* colour = "");
  void thin(Thinned& kind, const std::string& line);
  void end_epochs(bool all, bool is_next = false);
  double since(base::TimePoint then) const;
  std::string waiting(size_t width) const;
  std::string status(size_t width) const;
  std::string ranks(size_t width) const;
  std::string erased();
  void show(bool at_once);
  std::string coloured(const char* colour, const std::string& text) const;

  const DisplayPlan plan_;
  const Screen screen_;
  const base::TimePoint begun_ = screen_.now();
  base::TimePoint shown_{}, line_at_ = begun_, trained_since_{};
  std::string lines_;          // that wait to be written
  std::vector<size_t> drawn_;  // lengths of the live region's lines
  std::set<std::string> said_;
  bool is_ready_ = false, is_over_ = false, is_told_ = false, is_saved_ = false;
  std::string missing_, reason_;         // ranks, and why they are waited for
  std::string address_ = plan_.address;  // where
  Thinned epoch_lines_, saves_;
  std::map<int64_t, Trainer> trainers_;  // by rank
  std::map<int64_t, Epoch> pending_;     // epochs without their line yet
  int64_t ended_ = 0;                    // newest epoch that has its line
  int64_t epoch_ = 0, epochs_ = 0;
  int64_t count_ = 0, trainers_of_job_ = 0;  // processes that train here, and trainers in all
  std::optional<double> loss_;
  std::string quality_;  // of the model, or what is trained
};

}  // namespace distrain::app
