#include "process/progress.h"

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "process/output.h"

namespace distrain::app {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

void write(const std::string& text) { write_all(STDERR_FILENO, text); }

std::optional<double> number(const Json& json, const char* name) {
  const auto it = json.find(name);
  if (it == json.end() || !it->is_number()) return std::nullopt;
  return it->get<double>();
}

/// How good the model is, by what its line says.
std::string quality_words(const Json& json) {
  if (const auto accuracy = number(json, "accuracy")) {
    return fmt::format("accuracy {:.2f} %", *accuracy * 100);
  }
  if (const auto perplexity = number(json, "perplexity")) {
    return fmt::format("perplexity {:.1f}", *perplexity);
  }
  if (const auto reward = number(json, "running_reward")) {
    return fmt::format("running reward {:.1f}", *reward);
  }
  return {};
}

size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string bar(double share) {
  constexpr int kCells = 20;
  const int full = std::clamp(static_cast<int>(share * kCells), 0, kCells);
  return '[' + std::string(full, '#') + std::string(kCells - full, '.') + ']';
}

}  // namespace

bool wants_progress() {
  struct stat out {};
  if (!isatty(STDERR_FILENO) || fstat(STDOUT_FILENO, &out) != 0) return false;
  // A pipe's reader may write to the same terminal, between our status lines.
  return S_ISREG(out.st_mode) || (S_ISCHR(out.st_mode) && out.st_rdev == makedev(1, 3));
}

Progress::Progress(bool enabled, int epochs)
    : enabled_(enabled),
      colour_(!std::getenv("NO_COLOR") || !*std::getenv("NO_COLOR")),
      epochs_(epochs) {}

void Progress::on_line(const std::string& line) {
  if (!enabled_) return;
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object()) return;
  const auto event = json.find("event");
  if (event == json.end() || !event->is_string()) return;
  if (*event == "ready") {
    ready_ = true;
  } else if (*event == "step" || *event == "epoch") {
    ready_ = true;
    epoch_ = std::max(epoch_, static_cast<int>(number(json, "epoch").value_or(0)));
    if (const auto loss = number(json, "loss")) loss_ = loss;
  } else if (*event == "episode") {
    ready_ = true;
    episode_ = static_cast<int64_t>(number(json, "episode").value_or(0));
    quality_ = quality_words(json);
  } else if (*event == "split") {
    ready_ = true;
    quality_ = fmt::format("{:.0f} micro-batches {:.2f} s", number(json, "num_split").value_or(0),
                           number(json, "batch_s").value_or(0));
    if (const auto loss = number(json, "loss")) loss_ = loss;
  } else if (*event == "eval") {
    if (const std::string words = quality_words(json); !words.empty()) quality_ = words;
  } else {
    return;
  }
  show(*event == "eval" || *event == "split");
}

void Progress::show(bool at_once) {
  const auto now = std::chrono::steady_clock::now();
  if (shown_ && !at_once && now - last_ < kInterval) return;
  last_ = now;
  std::string text = ready_ ? "training" : "starting";
  if (epochs_ > 0 && epoch_ > 0) {
    text =
        fmt::format("{} epoch {}/{}", bar(static_cast<double>(epoch_) / epochs_), epoch_, epochs_);
  }
  if (episode_ > 0) text = fmt::format("episode {}", episode_);
  if (loss_) text += fmt::format("  loss {:.4f}", *loss_);
  if (!quality_.empty()) text += "  " + quality_;
  text = text.substr(0, terminal_width() - 1);
  write(fmt::format("\r\x1b[K{}{}{}", colour_ ? "\x1b[36m" : "", text, colour_ ? "\x1b[0m" : ""));
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  write("\r\x1b[K");
  shown_ = false;
}

void Progress::finish(const Json& end) {
  clear();
  if (!enabled_ || end.value("status", "") != "ok") return;
  std::string text = "done";
  if (const auto steps = number(end, "steps")) text += fmt::format(": {:.0f} steps", *steps);
  if (const auto wall = number(end, "wall_s")) text += fmt::format(" in {:.2f} s", *wall);
  if (const auto loss = number(end, "loss")) text += fmt::format(", loss {:.4f}", *loss);
  if (const std::string words = quality_words(end); !words.empty()) text += ", " + words;
  write(fmt::format("{}{}{}\n", colour_ ? "\x1b[32m" : "", text, colour_ ? "\x1b[0m" : ""));
}

}  // namespace distrain::app
