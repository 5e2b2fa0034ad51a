// Tests of batches that one process hands out to several trainers.
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>

#include "distrain/data/remote_stream.h"
#include "distrain/net/socket.h"
#include "streams.h"
#include "support/catch.h"
#include "support/error_of.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;

namespace {

RemoteStream::Take taker(StreamServer& server, int trainer) {
  return [&server, trainer](const StreamPosition& from, int64_t first, int64_t count) {
    return base::Future<HandedOut>::ready(server.take(trainer, from, first, count));
  };
}

// Reads the rest of the epoch, one batch of each trainer in turn.
struct Trainers {
  Trainers(const StreamOptions& options, int count) : server(options, count) {
    for (int trainer = 0; trainer < count; ++trainer) {
      streams.push_back(std::make_unique<RemoteStream>(taker(server, trainer)));
    }
  }
  std::vector<Ints> round() {
    std::vector<Ints> batches;
    for (const auto& stream : streams) {
      if (stream->ready() > 0) batches.push_back(ints(stream->next().indices));
    }
    return batches;
  }

  StreamServer server;
  std::vector<std::unique_ptr<RemoteStream>> streams;
};

}  // namespace

TEST_CASE("Batches of a stream are handed out in turn, from every position") {
  const Folder folder;
  const StreamOptions options = options_of({folder.write("data", numbered(0, 301))}, 2);
  Stream whole(options);
  whole.begin({});
  std::vector<Ints> batches;
  while (whole.ready() > 0) batches.push_back(ints(whole.next().indices));
  for (const int count : {1, 2, 3, 4}) {
    Trainers trainers(options, count);
    std::vector<StreamPosition> positions(1);  // before each round
    size_t next = 0;
    for (auto& stream : trainers.streams) stream->begin({});
    for (std::vector<Ints> round = trainers.round(); !round.empty(); round = trainers.round()) {
      for (const Ints& batch : round) REQUIRE(batch == batches.at(next++));
      for (const auto& stream : trainers.streams) {
        REQUIRE((stream->position() == trainers.streams[0]->position() || next == batches.size()));
      }
      positions.push_back(trainers.streams[0]->position());
    }
    REQUIRE(next == batches.size());
    for (size_t round = 0; round < positions.size(); round += 7) {
      Trainers resumed(options, count);
      for (auto& stream : resumed.streams) stream->begin(positions[round]);
      size_t at = round * static_cast<size_t>(count);
      for (auto rest = resumed.round(); !rest.empty(); rest = resumed.round()) {
        for (const Ints& batch : rest) REQUIRE(batch == batches.at(at++));
      }
      REQUIRE(at >= batches.size());
    }
    for (auto& stream : trainers.streams) stream->begin({.epoch = 2});
    REQUIRE(trainers.round().at(0) != batches[0]);  // in another order
  }
}

TEST_CASE("A server of batches that stops ends a wait for a pipe") {
  const Folder folder;
  StreamOptions options = options_of({folder.write("data", numbered(0, 9))});
  options.paths = {folder.path() + "/fifo"};
  REQUIRE(::mkfifo(options.paths[0].c_str(), 0600) == 0);
  const net::Fd writer(::open(options.paths[0].c_str(), O_RDWR));
  StreamServer server(options, 1);
  std::thread stopper([&] { server.stop(); });
  CHECK_THROWS_AS(server.take(0, {}, 0, 1), base::Exception);
  stopper.join();
}

TEST_CASE("A server of batches counts bad rows once, and passes on what is wrong with the data") {
  const Folder folder;
  StreamOptions options = options_of({folder.write("data", numbered(0, 9) + "no label\n")});
  options.bad_rows = BadRows::kSkip;
  Trainers skipping(options, 2);
  for (auto& stream : skipping.streams) stream->begin({});
  while (!skipping.round().empty()) {
  }
  CHECK(skipping.streams[0]->counts().bad_rows == 1);
  CHECK(contains(skipping.streams[0]->counts().first_bad_row, "data:10:1: "));
  CHECK(skipping.streams[1]->counts().bad_rows == 0);
  options.bad_rows = BadRows::kStop;
  StreamServer stopping(options, 2);
  CHECK(contains(error_of([&] { stopping.take(0, {}, 0, 16); }).message, "data:10:1: "));
  CHECK(contains(error_of([&] { stopping.take(0, {.epoch = 2}, 1, 1); }).message,
                 "not handed out now"));
  CHECK(contains(error_of([&] { stopping.take(2, {}, 0, 1); }).message, "not handed out now"));
}

}  // namespace distrain::data
