// How a session comes back when the service's process was replaced: docs/protocol.md has the steps.
//
// One thread does it, the first whose call finds the side socket ended. If it runs out of time it leaves things so that
// the next call can go on: a socket whose hello has no answer yet is kept, as the service may take it for the session's
// newest one.
#include <thread>
#include <unordered_map>
#include <utility>

#include "link.hpp"
#include "raising.hpp"
#include "sequence_state.hpp"

namespace kvharbor::detail {
namespace {

constexpr Milliseconds kPause{50};
// Of one call to a process that may have ended again; it is repeated as long as that has not.
constexpr Milliseconds kAttempt{2000};
// Of one Resume: well below what a message may have, as one sequence alone can be of some MiB.
constexpr std::size_t kBatchBytes = 8 * 1024 * 1024;
// Of one Resume too: the service takes 8,192.
constexpr int kBatchItems = 4096;

void pause(Deadline until) {
  std::this_thread::sleep_until(std::min(until, Clock::now() + kPause));
}

}  // namespace

// Returns the way to the service as it stands, which is brought back first if it has ended.
Link::Present Link::present(Deadline until) {
  if (options_.away_wait) until = std::min(until, Clock::now() + *options_.away_wait);
  std::unique_lock<std::mutex> lock = guard();
  while (true) {
    if (ended_by_ != nullptr) std::rethrow_exception(ended_by_);
    if (returning_) {
      if (changed_.wait_until(lock, until) == std::cv_status::timeout && returning_) raise_away();
    } else if (!side_->ended()) {
      return {side_, wire_, life_};
    } else {
      if (!away_since_) away_since_ = Clock::now();
      returning_ = true;
      lock.unlock();
      come_back(until);
      lock.lock();
    }
  }
}

// Brings the session back. Called by one thread at a time, which has set `returning_`; resets it.
void Link::come_back(Deadline until) {
  try {
    while (true) {
      const std::optional<v1::Welcome> welcome = greeted(until);
      if (!welcome) continue;
      const auto side = std::exchange(arriving_, nullptr);
      const auto wire = std::make_shared<const Wire>(address_.target, welcome->session_token());
      if (told(*welcome, *wire, *side, until)) return arrive(side, *welcome, wire);
      earlier_.push_back(side);
      if (Clock::now() >= until) raise_away();
    }
  } catch (const SessionGone&) {
    const auto lock = guard();
    returning_ = false;
    end(std::current_exception());
  } catch (...) {
    const auto lock = guard();
    returning_ = false;
    changed_.notify_all();
    throw;
  }
}

// Says hello to the next process; nothing if it has ended again, or there is none yet.
std::optional<v1::Welcome> Link::greeted(Deadline until) {
  try {
    if (!arriving_) {
      auto side = std::make_shared<SideSocket>(address_.side_path, std::min(until, Clock::now() + kAttempt));
      side->send(hello(true), until);
      arriving_ = std::move(side);
    }
    std::optional<SideAnswer> answer = arriving_->receive(until);
    if (!answer) raise_away();
    if (answer->message.has_welcome()) return answer->message.welcome();
    // The service closes a socket whose hello it refuses.
    arriving_.reset();
    refused_return(error_of(answer->message.refused()));
  } catch (const SessionLost&) {
    if (!arriving_) throw;
    // The end of the stream: that process has ended as well, and may have taken the session up.
    earlier_.push_back(std::exchange(arriving_, nullptr));
  } catch (const ServiceUnreachable&) {
    // The supervisor has ended too: nobody knows when it will be back, and who closes need not know.
    const auto lock = guard();
    if (closing_) raise<SessionLost>("the service at " + address_.target + " has ended, and the session with it");
  } catch (const DeadlineExceeded&) {
    // A full backlog.
  }
  if (Clock::now() >= until) raise_away();
  pause(until);
  return std::nullopt;
}

// Throws unless the refusal of a hello means that it can be said again.
void Link::refused_return(const std::exception_ptr& error) const {
  if (is_a<Starting>(error) || is_a<Draining>(error) || is_a<DescriptorsExhausted>(error)) return;
  if (!is_a<StaleEpoch>(error)) std::rethrow_exception(error);
  raise<SessionLost>("the service at " + address_.target +
                     " has lost its state and begun another epoch, and the session has ended: connect again");
}

// Tells the process behind `side` what is held here; false when it has ended on the way, or time is out.
bool Link::told(const v1::Welcome& welcome, const Wire& wire, const SideSocket& side, Deadline until) {
  for (const v1::ResumeRequest& request : snapshot(welcome)) {
    while (true) {
      if (side.ended() || Clock::now() >= until) return false;
      grpc::ClientContext context;
      wire.prepare(context, std::min(until, Clock::now() + kAttempt));
      v1::ResumeResponse reply;
      const grpc::Status status = wire.cache->Resume(&context, request, &reply);
      if (status.ok()) {
        resumed(request, reply);
        break;
      }
      const std::exception_ptr error = error_of(status, address_.target);
      if (is_a<PoolNotFound>(error)) {
        lose_sequences_of(request.pool_id(), error);
        break;
      }
      if (!is_a<Unavailable>(error)) std::rethrow_exception(error);
      side.wait_for_end(std::min(until, Clock::now() + kPause));
    }
  }
  return true;
}

// What to tell about each pool that the service knows this session to have open. From here on no answer of an earlier
// process is taken in. Sequences in other pools are lost.
std::vector<v1::ResumeRequest> Link::snapshot(const v1::Welcome& welcome) {
  const auto lock = guard();
  ++life_;
  if (welcome.session_token().empty()) return {};
  // One that is being destroyed may have another beside it, where an allocate was repeated by its request_id.
  std::unordered_map<std::string, std::unordered_map<std::string, SequenceState*>> held;
  for (SequenceState* each : sequences_) {
    // What has ended is released by not being named.
    if (!each->ended) held[each->pool->descriptor.pool_id][each->id] = each;
  }
  std::vector<v1::ResumeRequest> requests;
  for (const std::string& pool_id : welcome.opened_pool_ids()) {
    requests.emplace_back().set_pool_id(pool_id);
    std::size_t size_bytes = 0;
    for (const auto& [id, sequence] : held[pool_id]) {
      v1::HeldSequence message = sequence->held();
      size_bytes += message.ByteSizeLong();
      const int batched = requests.back().sequences_size();
      if ((size_bytes > kBatchBytes && batched > 0) || batched == kBatchItems) {
        requests.emplace_back().set_pool_id(pool_id);
        size_bytes = message.ByteSizeLong();
      }
      *requests.back().add_sequences() = std::move(message);
    }
    requests.back().set_complete(true);
    held.erase(pool_id);
  }
  for (const auto& [pool_id, lost] : held) {
    for (const auto& [id, sequence] : lost) {
      sequence->lose(std::make_exception_ptr(
          PoolNotFound({PoolNotFound::kReason, "the pool is not open any more", {{"poolId", pool_id}}})));
    }
  }
  return requests;
}

void Link::resumed(const v1::ResumeRequest& request, const v1::ResumeResponse& reply) {
  std::unordered_map<std::string, const v1::ResumeResult*> results;
  for (int index = 0; index < std::min(request.sequences_size(), reply.results_size()); ++index) {
    results[request.sequences(index).sequence().sequence_id()] = &reply.results(index);
  }
  const auto lock = guard();
  for (SequenceState* each : sequences_) {
    const auto result = results.find(each->id);
    if (result != results.end()) each->resumed(*result->second);
  }
}

void Link::lose_sequences_of(const std::string& pool_id, const std::exception_ptr& cause) {
  const auto lock = guard();
  for (SequenceState* each : sequences_) {
    if (each->pool->descriptor.pool_id == pool_id) each->lose(cause);
  }
}

void Link::arrive(std::shared_ptr<SideSocket> side, const v1::Welcome& welcome, std::shared_ptr<const Wire> wire) {
  const auto lock = guard();
  side_ = std::move(side);
  wire_ = std::move(wire);
  session_ = welcome;
  earlier_.clear();
  away_since_.reset();
  returning_ = false;
  if (closing_ && ended_by_ != nullptr) side_->end();
  changed_.notify_all();
}

void Link::raise_away() const {
  const auto since = away_since_.value_or(Clock::now());
  const auto away_ms = std::chrono::duration_cast<Milliseconds>(Clock::now() - since).count();
  raise<ServiceAway>("the service at " + address_.target + " has been away for " + std::to_string(away_ms) +
                         " ms: try again, or wait longer (timeout, away_wait)",
                     {{"address", address_.target}, {"awayMs", std::to_string(away_ms)}});
}

}  // namespace kvharbor::detail
