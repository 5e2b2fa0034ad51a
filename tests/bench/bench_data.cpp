// Measures streams of training data: the examples of a file in the formats of Criteo and fastText,
// plain and gzip, in megabytes of text per second. Prints a JSON line for each. `mb_per_cpu_s`
// divides by the processor time of the reading thread, so that other load on the machine matters
// less. Usage: bench_data [examples [hash_bits]]
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/resource.h>
#include <zlib.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/data/stream.h"

using namespace distrain;

namespace {

// Returns lines of 39 features with few frequent and many rare values, as clicks have.
std::string random_text(data::Format format, int64_t examples) {
  base::Random random({1});
  std::string text;
  char field[32];
  for (int64_t i = 0; i < examples; ++i) {
    const bool criteo = format == data::Format::kCriteo;
    text += criteo ? "" : "__label__";
    text += random.below(4) == 0 ? '1' : '0';
    for (int k = 0; k < 39; ++k) {
      const double skewed = random.unit() * random.unit() * random.unit();
      const bool empty = random.below(10) == 0;
      if (!criteo) {
        std::snprintf(field, sizeof field, " %d:%x", k, static_cast<int>(skewed * 1000));
      } else if (k < 13) {
        std::snprintf(field, sizeof field, "\t%d", static_cast<int>(skewed * 2000));
      } else {
        const auto value = static_cast<uint32_t>(base::hash_of(std::to_string(int(skewed * 1e5))));
        std::snprintf(field, sizeof field, "\t%08x", value);
      }
      text += criteo && empty ? "\t" : field;
    }
    text += '\n';
  }
  return text;
}

void write_file(const std::string& path, const std::string& text, bool compressed) {
  if (!compressed) {
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  const gzFile file = gzopen(path.c_str(), "wb6");
  for (size_t at = 0; file && at < text.size(); at += size_t{1} << 20) {
    gzwrite(file, text.data() + at,
            static_cast<unsigned>(std::min(text.size() - at, size_t{1} << 20)));
  }
  if (!file || gzclose(file) != Z_OK) base::bad_data("cannot write " + path);
}

double processor_seconds(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& time) { return time.tv_sec + time.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void measure(const std::string& path, data::Format format, bool compressed, int hash_bits,
             size_t text_size) {
  data::StreamOptions options{.paths = {path}, .format = format, .batch_size = 256};
  const base::TimePoint scan_start = base::Clock::now();
  options.vocabulary = std::make_shared<const data::TextVocabulary>(
      data::scan_vocabulary(options.paths, format, hash_bits));
  const double scan_s = base::seconds_since(scan_start);
  data::Stream stream(options);
  const auto reader_s = [] {
    return processor_seconds(RUSAGE_SELF) - processor_seconds(RUSAGE_THREAD);
  };
  const double reader_before = reader_s();
  const base::TimePoint start = base::Clock::now();
  stream.begin({});
  stream.ready();
  const double first_s = base::seconds_since(start);
  while (stream.ready() > 0) stream.next();
  const double s = base::seconds_since(start), cpu_s = reader_s() - reader_before;
  const double megabytes = static_cast<double>(text_size) * 1e-6;
  std::printf(
      "{\"bench\":\"data\",\"format\":\"%s\",\"file\":\"%s\",\"hash_bits\":%d,\"examples\":%lld,"
      "\"mb_per_s\":%.1f,\"mb_per_cpu_s\":%.1f,\"first_batch_ms\":%.1f,\"scan_ms\":%.1f}\n",
      format == data::Format::kCriteo ? "criteo" : "fasttext", compressed ? "gzip" : "plain",
      hash_bits, static_cast<long long>(stream.counts().examples), megabytes / s, megabytes / cpu_s,
      first_s * 1e3, scan_s * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t examples = argc > 1 ? std::atoll(argv[1]) : 500'000;
  const int hash_bits = argc > 2 ? std::atoi(argv[2]) : 24;
  char folder[] = "/tmp/bench_data_XXXXXX";
  if (!mkdtemp(folder)) return 1;
  for (const auto format : {data::Format::kCriteo, data::Format::kFastText}) {
    const std::string text = random_text(format, examples), path = std::string(folder) + "/file";
    for (const bool compressed : {false, true}) {
      write_file(path, text, compressed);
      measure(path, format, compressed, hash_bits, text.size());
      if (format == data::Format::kFastText) measure(path, format, compressed, 0, text.size());
    }
  }
  std::filesystem::remove_all(folder);
  return 0;
}
