#include "link.hpp"

#include <unistd.h>

#include <utility>

#include "raising.hpp"
#include "version.hpp"

namespace kvharbor::detail {
namespace {

constexpr const char* kApiVersion = "v1";
// How long to wait for news of the service before a call is sent again: its end is seen a moment after a call's.
constexpr Milliseconds kFirstPause{50};
constexpr Milliseconds kMostPause{400};
constexpr Milliseconds kUndoTimeout{1000};

void check(const Options& options) {
  if (options.timeout <= Milliseconds(0) || options.open_pool_timeout <= Milliseconds(0)) {
    raise_invalid("timeout", std::to_string(options.timeout.count()) + " ms", "above 0", "give the calls some time");
  }
}

v1::Welcome welcome_of(const SideAnswer& answer) {
  if (!answer.message.has_welcome()) {
    throw ServiceBug({"", "the service answered a hello with something else than a welcome", {}});
  }
  return answer.message.welcome();
}

// Whether a request was refused before anything was done, and is granted some time.
bool refused_for_now(const std::exception_ptr& error) {
  return is_a<ResumeRequired>(error) || is_a<Draining>(error) || is_a<Starting>(error);
}

// Whether the failure of a call says nothing of the times that it was sent before.
bool is_for_now(const HarborError& failure) {
  return dynamic_cast<const Unavailable*>(&failure) != nullptr ||
         dynamic_cast<const ResumeRequired*>(&failure) != nullptr;
}

// Whether a call that failed with `error` may be sent again, while there is time.
bool may_repeat(const std::exception_ptr& error, Repeat repeat) {
  return refused_for_now(error) || (repeat == Repeat::kAlways && is_a<ServiceUnreachable>(error));
}

}  // namespace

Link::Link(const std::string& socket_path, Options options, std::optional<Membership> membership)
    : options_(std::move(options)),
      membership_(std::move(membership)),
      address_(parse_address(socket_path)),
      process_(getpid()) {
  check(options_);
  const Deadline until = Clock::now() + options_.timeout;
  side_ = std::make_shared<SideSocket>(address_.side_path, until);
  session_ = welcome_of(side_->ask(hello(false), until));
  wire_ = std::make_shared<const Wire>(address_.target, session_.session_token());
}

Link::~Link() {
  // gRPC's threads are not there in a forked child: its objects are left as they are.
  if (forked()) new std::shared_ptr<const Wire>(std::move(wire_));
}

void Link::run(const Call& call) {
  require_open();
  require_leader();
  // Whether a process that has ended may have taken it, or the next one is told of it as taken.
  bool may_have_effect = false;
  try {
    send_until_answered(call, may_have_effect);
  } catch (HarborError& failure) {
    if (is_for_now(failure)) failure.may_have_effect_ = may_have_effect;
    throw;
  }
}

void Link::send_until_answered(const Call& call, bool& may_have_effect) {
  const Deadline until = Clock::now() + call.timeout;
  Milliseconds pause = kFirstPause;
  while (true) {
    const Present now = present(until);
    if (call.sending) {
      const auto lock = guard();
      if (now.life != life_) continue;
      call.sending();
      may_have_effect = true;
    }
    grpc::ClientContext context;
    now.wire->prepare(context, until);
    const grpc::Status status = call.send(*now.wire, context);
    if (status.ok()) {
      const auto lock = guard();
      if (now.life == life_ || call.repeat == Repeat::kNever) return call.take();
      // What answered has ended since, and its successor knows nothing of the call.
      may_have_effect = true;
      continue;
    }
    const std::exception_ptr error = error_of(status, address_.target);
    may_have_effect = may_have_effect || !refused_for_now(error);
    require_open();
    if (is_a<DeadlineExceeded>(error)) undo(call, *now.wire);
    if (!may_repeat(error, call.repeat) || Clock::now() >= until) std::rethrow_exception(error);
    now.side->wait_for_end(std::min(until, Clock::now() + pause));
    pause = std::min(2 * pause, kMostPause);
  }
}

SideAnswer Link::ask_side(const v1::SideRequest& request) {
  require_open();
  const Deadline until = Clock::now() + options_.timeout;
  const std::lock_guard<std::mutex> one_at_a_time(asking_);
  while (true) {
    const Present now = present(until);
    try {
      return now.side->ask(request, until);
    } catch (const SessionLost&) {
      // The end of the stream: the next process answers, if there is one in time.
      if (Clock::now() >= until || !now.side->ended()) throw;
    } catch (const HarborError&) {
      // To a member the pool is not there before the leader has resumed it.
      if (Clock::now() >= until || !refused_for_now(std::current_exception())) throw;
      now.side->wait_for_end(std::min(until, Clock::now() + kFirstPause));
    }
  }
}

void Link::close() {
  if (forked()) return;
  bool leads = false;
  {
    const auto lock = guard();
    if (std::exchange(closing_, true)) return;
    leads = !session_.session_token().empty();
  }
  std::exception_ptr failure;
  try {
    if (leads) close_session();
  } catch (const SessionGone&) {
    // Ended already.
  } catch (...) {
    failure = std::current_exception();
  }
  const auto lock = guard();
  end(std::make_exception_ptr(HarborClosed({HarborClosed::kReason, "the harbor is closed: connect again", {}})));
  side_->end();
  for (const auto& side : earlier_) side->end();
  if (arriving_) arriving_->end();
  if (failure) std::rethrow_exception(failure);
}

void Link::close_session() {
  v1::CloseSessionResponse reply;
  Call call;
  call.send = [&reply](const Wire& wire, grpc::ClientContext& context) {
    return wire.pools->CloseSession(&context, v1::CloseSessionRequest(), &reply);
  };
  call.take = [] {};
  call.timeout = options_.timeout;
  run(call);
}

v1::Welcome Link::session() const {
  if (forked()) return {};
  const auto lock = guard();
  return session_;
}

void Link::require_open() const {
  if (forked()) {
    raise<HarborClosed>("the harbor was opened by the parent of this process: connect again after a fork");
  }
  const auto lock = guard();
  if (ended_by_ != nullptr) std::rethrow_exception(ended_by_);
}

// A member has no token for calls: the service could only say that it needs one.
void Link::require_leader() const {
  if (!membership_) return;
  const std::string remedy = "its leader opens the pool and makes all calls, Harbor::attach maps the pool here";
  raise<SessionRequired>("a member of a session makes no calls: " + remedy, {{"remedy", remedy}});
}

bool Link::forked() const {
  return getpid() != process_;
}

bool Link::away() const {
  return !returning_ && side_->ended();
}

void Link::undo(const Call& call, const Wire& wire) const {
  if (!call.undo) return;
  // Best effort: where this fails too, the end of the session gives everything back.
  grpc::ClientContext context;
  wire.prepare(context, Clock::now() + kUndoTimeout);
  call.undo(wire, context);
}

v1::SideRequest Link::hello(bool resume) const {
  v1::SideRequest request;
  v1::Hello& hello = *request.mutable_hello();
  hello.set_client_name(options_.client_name);
  hello.set_client_version(std::string("kvharbor-cpp/") + kVersion);
  hello.add_api_versions(kApiVersion);
  hello.mutable_engine()->set_name(options_.engine.name);
  hello.mutable_engine()->set_version(options_.engine.version);
  hello.mutable_engine()->set_instance(options_.engine.instance);
  if (resume) {
    const bool leads = !session_.session_token().empty();
    hello.mutable_resume()->set_token(leads ? session_.session_token() : session_.member_token());
    hello.mutable_resume()->set_epoch(session_.epoch());
  } else if (membership_) {
    hello.mutable_join()->set_join_token(membership_->join_token);
    hello.mutable_join()->set_rank(membership_->rank);
    hello.mutable_join()->set_mode(membership_->read_only ? v1::MEMBER_MODE_READ_ONLY : v1::MEMBER_MODE_READ_WRITE);
  }
  return request;
}

void Link::end(std::exception_ptr cause) {
  if (ended_by_ == nullptr) {
    ended_by_ = std::move(cause);
    ++life_;
  }
  changed_.notify_all();
}

}  // namespace kvharbor::detail
