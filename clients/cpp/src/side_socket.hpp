// The side socket: its life is the session's life, and descriptors travel on it. side.proto says how.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "clock.hpp"
#include "file_descriptor.hpp"
#include "forks.hpp"
#include "kvharbor/v1/side.pb.h"

namespace kvharbor::detail {

// One message of the service with the descriptors that came with it.
struct SideAnswer {
  v1::SideResponse message;
  std::vector<FileDescriptor> descriptors;
};

// A connection. One thread at a time sends and receives; any may ask whether it has ended.
class SideSocket {
 public:
  // Connects, and says nothing yet. While the service's process is being replaced the connection waits in the backlog.
  // Throws ServiceUnreachable when nobody listens or this process may not connect, DeadlineExceeded.
  SideSocket(std::string path, Deadline until);

  // Sends a request. A service that refuses before it has read has closed its end: its answer is there to be received.
  // Throws DeadlineExceeded, SessionLost.
  void send(const v1::SideRequest& request, Deadline until);

  // Returns the next answer, or nothing at the deadline, after which it may be called again. Notices are skipped.
  // Throws SessionLost at the end of the stream, ServiceBug for what is no frame.
  std::optional<SideAnswer> receive(Deadline until);

  // Sends a request and returns its answer. Throws what it was refused with. At the deadline the socket is ended, as a
  // late answer would be taken for that of the next request: DeadlineExceeded.
  SideAnswer ask(const v1::SideRequest& request, Deadline until);

  // Ends the connection for the service and for threads that wait here.
  void end();
  // Whether the other end is gone, or was ended here.
  bool ended() const;
  // Waits until it has ended or the deadline has passed.
  void wait_for_end(Deadline until) const;

 private:
  bool fill(std::size_t size_bytes, Deadline until);
  bool wait(short events, Deadline until) const;
  [[noreturn]] void lost(const std::string& cause) const;

  std::string path_;
  ParentsDescriptor socket_;
  std::string inbox_;
  std::vector<FileDescriptor> arrived_;
};

}  // namespace kvharbor::detail
