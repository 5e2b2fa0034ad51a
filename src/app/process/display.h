#pragma once

#include <algorithm>
#include <set>

#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

class OutputQueue;

/// The functions by which a Display writes to a terminal or file. None waits for a slow reader.
struct Screen {
  std::function<void(std::string text)> write;
  /// Returns true if lines may be written now; otherwise the Display queues them.
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
    kWarnings,  ///< only warnings, lost ranks and a hint, because the terminal shows JSON lines
    kLines,     ///< whole lines only
    kFull,      ///< lines, and below them a live region with a progress bar
  };
  Mode mode = Mode::kNone;
  bool pretty = false;   ///< writes to stdout, which then gets no JSON lines
  bool colours = false;  ///< uses the terminal's escape sequences for colours
  bool hint = false;     ///< in mode kWarnings, mentions --pretty after a successful job
  bool on_terminal = false;
  std::string header;   ///< the first line that is shown
  std::string address;  ///< rank 0's address if ranks start elsewhere; otherwise empty
  bool has_rank_0 = true;
  std::string to_go_on;  ///< command line that resumes the job; empty if the job does not save
};

/// Returns a Screen that writes to stderr or, if `plan.pretty`, by way of `lines` to stdout. Its
/// writes do not block, even if the user has stopped the terminal (Ctrl-S).
Screen screen_of(const DisplayPlan& plan, OutputQueue& lines);

/// Chooses the mode by `progress` (auto, plain, none) and the file types of stdout and stderr.
/// `is_first`: this process is or starts rank 0. `is_leader`: no other process of its group draws.
DisplayPlan plan_display(const std::string& progress, bool pretty, bool is_first, bool is_leader);

/// Shows a job's progress to a person, from the job's events and EventSink::progress(): a header,
/// permanent lines, and a live region that is redrawn at most 10 times a second. Not thread-safe.
class Display {
 public:
  Display(DisplayPlan plan, Screen screen) : plan_(std::move(plan)), screen_(std::move(screen)) {}

  void begin();
  void on_event(const Json& event);
  /// Updates elapsed times. Call it at next_tick(), which is kNever if there is nothing to update.
  void tick();
  base::TimePoint next_tick() const;
  /// Removes the live region, so that other text can be written to the terminal.
  void clear() {
    if (!drawn_.empty() && screen_.is_free()) screen_.write(erased());
  }
  /// Shows how the job ended. Later events are ignored.
  void finish(const Json& end);
  /// Returns true if finish() has shown that a signal ended the job.
  bool is_told() const { return is_told_; }
  bool pretty() const { return plan_.pretty; }
  bool is_on() const { return plan_.mode != Mode::kNone; }

 private:
  using Mode = DisplayPlan::Mode;
  struct Trainer {
    std::string name = {};
    std::optional<int64_t> first;  // the step that the trainer reported first
    int64_t step = 0, steps = 0;   // `step` of the job's `steps` are complete
    bool lost = false;
  };
  struct Epoch {
    std::set<int64_t> ranks;
    double loss = 0, steps = 0, seconds = 0;
    std::string evaluation;
    bool is_partial = false;
  };
  struct Thinned {  // lines of one kind, of which thin() shows at most one a second
    int shown = 0;
    base::TimePoint at{};
    std::string held;  // the newest line, if it is not shown yet
  };

  void on_progress(const Json& event);
  int64_t count() const { return std::max<int64_t>(count_, std::ssize(trainers_)); }
  void stay(const std::string& line, const char* colour = "");
  void thin(Thinned& kind, const std::string& line);
  void end_epochs(bool all, bool is_next = false);
  double since(base::TimePoint then) const {
    return std::chrono::duration<double>(screen_.now() - then).count();
  }
  std::string waiting(size_t width) const;
  std::string status(size_t width) const;
  std::string ranks(size_t width) const;
  std::string erased();
  void show(bool at_once);
  std::string coloured(const char* colour, const std::string& text) const {
    return plan_.colours && *colour ? colour + text + "\x1b[0m" : text;
  }

  const DisplayPlan plan_;
  const Screen screen_;
  const base::TimePoint begun_ = screen_.now();
  base::TimePoint shown_{}, line_at_ = begun_, trained_since_{};
  std::string lines_;          // lines to write when the screen is free
  std::vector<size_t> drawn_;  // lengths of the live region's lines
  std::set<std::string> said_;
  bool is_ready_ = false, is_over_ = false, is_told_ = false, is_saved_ = false;
  std::string missing_, reason_;         // the ranks that have not joined, and why
  std::string address_ = plan_.address;  // where ranks connect to rank 0
  Thinned epoch_lines_, saves_;
  std::map<int64_t, Trainer> trainers_;  // by rank
  std::map<int64_t, Epoch> pending_;     // epochs whose line is not shown yet
  int64_t ended_ = 0;                    // the newest epoch whose line is shown
  int64_t epoch_ = 0, epochs_ = 0;
  int64_t count_ = 0, trainers_of_job_ = 0;  // number of trainers shown here, and in the job
  std::optional<double> loss_;
  std::string quality_;  // the model's metrics, or the number of micro-batches
};

}  // namespace distrain::app
