#pragma once

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "process/json_lines.h"
#include "process/output.h"

namespace distrain::app {

/// One status line on stderr, rewritten as `step`, `epoch`, `episode` and `eval` lines come by.
/// Only when stderr is a terminal and nobody reads stdout as we go: it is a file or /dev/null.
class Progress {
 public:
  /// `epochs`: of the whole job, for "epoch 3/15".
  Progress(bool wanted, int epochs) : enabled_(wanted && has_terminal()), epochs_(epochs) {}

  void on_line(const std::string& line) {
    if (!enabled_) return;
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) return;
    const Json event = json.value("event", Json());
    if (event == "step" || event == "epoch") {
      epoch_ = std::max(epoch_, static_cast<int>(number_in(json, "epoch").value_or(0)));
    } else if (event == "episode") {
      episode_ = static_cast<int64_t>(number_in(json, "episode").value_or(0));
      quality_ = quality_words(json);
    } else if (event == "split") {
      quality_ =
          fmt::format("{:.0f} micro-batches {:.2f} s", number_in(json, "num_split").value_or(0),
                      number_in(json, "batch_s").value_or(0));
    } else if (event == "eval") {
      if (const std::string words = quality_words(json); !words.empty()) quality_ = words;
    } else if (event != "ready") {
      return;
    }
    ready_ = ready_ || event != "eval";
    const bool has_loss = event == "step" || event == "epoch" || event == "split";
    if (const auto loss = number_in(json, "loss"); loss && has_loss) loss_ = loss;
    show(event == "eval" || event == "split");
  }

  /// Takes the status line away, so that other text can be written.
  void clear() {
    if (shown_) write("\r\x1b[K");
    shown_ = false;
  }

  void finish(const Json& end) {
    clear();
    if (!enabled_ || end.value("status", "") != "ok") return;
    std::string text = "done";
    if (const auto steps = number_in(end, "steps")) text += fmt::format(": {:.0f} steps", *steps);
    if (const auto wall = number_in(end, "wall_s")) text += fmt::format(" in {:.2f} s", *wall);
    if (const auto loss = number_in(end, "loss")) text += fmt::format(", loss {:.4f}", *loss);
    if (const std::string words = quality_words(end); !words.empty()) text += ", " + words;
    write(coloured("\x1b[32m", text) + '\n');
  }

 private:
  static bool has_terminal() {
    struct stat out {};
    if (!isatty(STDERR_FILENO) || fstat(STDOUT_FILENO, &out) != 0) return false;
    // A pipe's reader may write to the same terminal, between our status lines.
    return S_ISREG(out.st_mode) || (S_ISCHR(out.st_mode) && out.st_rdev == makedev(1, 3));
  }

  /// How good the model is, by what its line says.
  static std::string quality_words(const Json& json) {
    if (const auto accuracy = number_in(json, "accuracy")) {
      return fmt::format("accuracy {:.2f} %", *accuracy * 100);
    }
    if (const auto perplexity = number_in(json, "perplexity")) {
      return fmt::format("perplexity {:.1f}", *perplexity);
    }
    const auto reward = number_in(json, "running_reward");
    return reward ? fmt::format("running reward {:.1f}", *reward) : "";
  }

  void show(bool at_once) {
    constexpr auto kInterval = std::chrono::milliseconds(100);
    const auto now = base::Clock::now();
    if (shown_ && !at_once && now - last_ < kInterval) return;
    last_ = now;
    std::string text = ready_ ? "training" : "starting";
    if (epochs_ > 0 && epoch_ > 0) {
      const std::string done(std::min<size_t>(20.0 * epoch_ / epochs_, 20), '#');
      text = fmt::format("[{:.<20}] epoch {}/{}", done, epoch_, epochs_);
    }
    if (episode_ > 0) text = fmt::format("episode {}", episode_);
    if (loss_) text += fmt::format("  loss {:.4f}", *loss_);
    if (!quality_.empty()) text += "  " + quality_;
    winsize size{};
    ioctl(STDERR_FILENO, TIOCGWINSZ, &size);
    const size_t width = size.ws_col > 0 ? size.ws_col : 80;
    write("\r\x1b[K" + coloured("\x1b[36m", text.substr(0, width - 1)));
    shown_ = true;
  }

  static std::string coloured(const std::string& colour, const std::string& text) {
    const char* const none = std::getenv("NO_COLOR");
    return none && *none ? text : colour + text + "\x1b[0m";
  }

  static void write(const std::string& text) { write_all(STDERR_FILENO, text); }

  const bool enabled_;
  const int epochs_;
  int epoch_ = 0;
  int64_t episode_ = 0;
  std::optional<double> loss_;
  std::string quality_;
  bool ready_ = false;
  bool shown_ = false;
  base::TimePoint last_{};
};

}  // namespace distrain::app
