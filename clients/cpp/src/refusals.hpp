// What the service says no with, as the classes of errors.hpp.
//
// A refusal comes in three forms, with the same reason and metadata in each: the details of a gRPC status, the status
// of an item of a batch, and `Refused` on the side socket.
#pragma once

#include <exception>
#include <string>

#include <grpcpp/support/status.h>

#include "kvharbor/errors.hpp"
#include "kvharbor/v1/side.pb.h"
#include "kvharbor/v1/types.pb.h"

namespace kvharbor::detail {

// The error of a failed call to `address`. The class follows from the reason, else from the code.
std::exception_ptr error_of(const grpc::Status& status, const std::string& address);
// The error of an item whose code is not OK.
std::exception_ptr error_of(const v1::ItemStatus& status);
// The error of a refusal on the side socket.
std::exception_ptr error_of(const v1::Refused& refused);
// The error for a service that is not there, with what to do about it.
std::exception_ptr unreachable(const std::string& address, const std::string& cause);

// Whether the error behind the pointer is a Kind.
template <class Kind>
bool is_a(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Kind&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace kvharbor::detail
