// The calls of the API as values.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "encoding.hpp"
#include "kvharbor/tokens.hpp"
#include "link.hpp"
#include "sequence_state.hpp"

namespace kvharbor::detail {

// A call of the CacheService with the link's timeout. `reply` is taken in by `take`, under the guard; both live as long
// as the call.
template <class Request, class Reply>
Call cache_call(const Link& link,
                grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                const Request& request, Reply& reply, std::function<void()> take) {
  Call call;
  call.send = [method, &request, &reply](const Wire& wire, grpc::ClientContext& context) {
    reply.Clear();
    return (wire.cache.get()->*method)(&context, request, &reply);
  };
  call.take = std::move(take);
  call.timeout = link.options().timeout;
  return call;
}

// An id that makes a call idempotent and undoable.
std::string new_request_id();

inline std::string bytes_of(Tokens tokens) {
  return encoded(tokens.begin(), tokens.end());
}

}  // namespace kvharbor::detail
