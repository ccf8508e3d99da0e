#include "side_socket.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include "raising.hpp"
#include "refusals.hpp"

namespace kvharbor::detail {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kMaxFrameBytes = 64 * 1024;
constexpr std::size_t kMaxDescriptors = 32;

std::string text_of(int code) {
  return std::system_category().message(code);
}

std::string frame_of(const v1::SideRequest& request) {
  const std::string payload = request.SerializeAsString();
  std::string frame;
  for (std::size_t byte = 0; byte < kLengthBytes; ++byte) {
    frame.push_back(static_cast<char>(payload.size() >> (8 * byte) & 0xff));
  }
  return frame + payload;
}

std::size_t length_of(const std::string& head) {
  std::size_t length = 0;
  for (std::size_t byte = 0; byte < kLengthBytes; ++byte) {
    length |= std::size_t{static_cast<unsigned char>(head[byte])} << (8 * byte);
  }
  return length;
}

int unix_socket() {
  const int number = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (number < 0) throw std::system_error(errno, std::system_category(), "socket");
  return number;
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Checked by whoever parsed the address.
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

void take_descriptors(msghdr& message, std::vector<FileDescriptor>& arrived) {
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t index = 0; index < count; ++index) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(each) + index * sizeof(int), sizeof(int));
      arrived.emplace_back(number);
    }
  }
}

}  // namespace

SideSocket::SideSocket(std::string path, Deadline until) : path_(std::move(path)), socket_(&unix_socket) {
  const int wait_ms = std::max(milliseconds_until(until), 1);
  const timeval wait{wait_ms / 1000, wait_ms % 1000 * 1000};
  setsockopt(socket_.number(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
  const sockaddr_un address = address_of(path_);
  if (connect(socket_.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return;
  if (errno == EAGAIN || errno == EINTR) {
    raise<DeadlineExceeded>(path_ + " took no connection in time: the service is overloaded", {{"address", path_}});
  }
  std::rethrow_exception(unreachable(path_, text_of(errno)));
}

void SideSocket::send(const v1::SideRequest& request, Deadline until) {
  const std::string frame = frame_of(request);
  for (std::size_t sent = 0; sent < frame.size();) {
    if (!wait(POLLOUT, until)) {
      raise<DeadlineExceeded>("could not send on " + path_ + " in time", {{"address", path_}});
    }
    const ssize_t count =
        ::send(socket_.number(), frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno == EPIPE) {
      return;
    } else if (errno != EAGAIN && errno != EINTR) {
      lost(text_of(errno));
    }
  }
}

std::optional<SideAnswer> SideSocket::receive(Deadline until) {
  while (true) {
    if (!fill(kLengthBytes, until)) return std::nullopt;
    const std::size_t length = length_of(inbox_);
    if (length > kMaxFrameBytes) {
      throw ServiceBug({"", "a frame of " + std::to_string(length) + " bytes on " + path_, {}});
    }
    if (!fill(kLengthBytes + length, until)) return std::nullopt;
    SideAnswer answer;
    const bool is_message = answer.message.ParseFromString(inbox_.substr(kLengthBytes));
    inbox_.clear();
    answer.descriptors = std::exchange(arrived_, {});
    if (!is_message) throw ServiceBug({"", "a frame that is no SideResponse on " + path_, {}});
    // A notice that this client has not accepted, of a kind that it does not know.
    if (answer.message.response_case() != v1::SideResponse::RESPONSE_NOT_SET &&
        !answer.message.has_warm_tasks_pending()) {
      return answer;
    }
  }
}

SideAnswer SideSocket::ask(const v1::SideRequest& request, Deadline until) {
  send(request, until);
  std::optional<SideAnswer> answer = receive(until);
  if (!answer) {
    end();
    raise<DeadlineExceeded>("no answer on " + path_ + " in time: the session has ended, connect again",
                            {{"address", path_}});
  }
  if (answer->message.has_refused()) std::rethrow_exception(error_of(answer->message.refused()));
  return std::move(*answer);
}

void SideSocket::end() {
  shutdown(socket_.number(), SHUT_RDWR);
}

bool SideSocket::ended() const {
  return wait(POLLRDHUP, Clock::now());
}

void SideSocket::wait_for_end(Deadline until) const {
  wait(POLLRDHUP, until);
}

// Receives until the inbox has so many bytes; false at the deadline. Never reads beyond: a descriptor comes with the
// first byte of its frame.
bool SideSocket::fill(std::size_t size_bytes, Deadline until) {
  while (inbox_.size() < size_bytes) {
    if (!wait(POLLIN, until)) return false;
    std::string piece(size_bytes - inbox_.size(), '\0');
    iovec place{piece.data(), piece.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t count = recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count < 0) lost(text_of(errno));
    if (count == 0) lost("closed by the service");
    take_descriptors(message, arrived_);
    if ((message.msg_flags & MSG_CTRUNC) != 0) {
      throw ServiceBug(
          {"", "more descriptors than a message may bring, or than this process may have, on " + path_, {}});
    }
    inbox_.append(piece, 0, static_cast<std::size_t>(count));
  }
  return true;
}

// Whether one of the events, an error or the end comes before the deadline.
bool SideSocket::wait(short events, Deadline until) const {
  while (true) {
    pollfd polled{socket_.number(), events, 0};
    if (polled.fd < 0) return true;
    const int count = poll(&polled, 1, milliseconds_until(until));
    if (count > 0) return true;
    if (count == 0 && Clock::now() >= until) return false;
    if (count < 0 && errno != EINTR) throw std::system_error(errno, std::system_category(), "poll");
  }
}

void SideSocket::lost(const std::string& cause) const {
  raise<SessionLost>("the session's socket " + path_ + " has ended (" + cause + "): connect again",
                     {{"address", path_}});
}

}  // namespace kvharbor::detail
