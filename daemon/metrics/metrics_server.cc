// KJ's HTTP server behind an accept loop that counts.
#include "daemon/metrics/metrics_server.h"

#include <kj/compat/http.h>
#include <kj/debug.h>

#include <string_view>

namespace kvq {
namespace {

constexpr std::uint64_t kAcceptPauseMs = 100;  // when descriptors have run out

// Whoever speaks no HTTP gets KJ's 400; what fails later (a reader that went or was cut) needs no answer.
class Errors final : public kj::HttpServerErrorHandler {
 public:
  kj::Promise<void> handleApplicationError(kj::Exception, kj::Maybe<kj::HttpService::Response&>) override {
    return kj::READY_NOW;
  }
};

class Server final : public MetricsServer, private kj::HttpService, private kj::TaskSet::ErrorHandler {
 public:
  Server(kj::AsyncIoContext& io, int listening_fd, MetricsServerOptions options)
      : options_(std::move(options)),
        timer_(io.provider->getTimer()),
        receiver_(io.lowLevelProvider->wrapListenSocketFd(listening_fd)),
        http_(timer_, table_, *this, settings()),
        serving_(*this) {
    serving_.add(accept());
  }
  ~Server() noexcept override {}

 private:
  kj::HttpServerSettings settings() {
    kj::HttpServerSettings out;
    out.headerTimeout = options_.deadline_ms * kj::MILLISECONDS;
    out.pipelineTimeout = options_.deadline_ms * kj::MILLISECONDS;
    out.errorHandler = errors_;
    return out;
  }

  kj::Promise<void> accept() {
    return receiver_->accept().then(
        [this](kj::Own<kj::AsyncIoStream>&& stream) {
          admit(kj::mv(stream));
          return accept();
        },
        [this](kj::Exception&&) {
          options_.log("event=metrics_accept_failed action=pause fix=\"raise LimitNOFILE\"");
          return timer_.afterDelay(kAcceptPauseMs * kj::MILLISECONDS).then([this] { return accept(); });
        });
  }

  void admit(kj::Own<kj::AsyncIoStream> stream) {
    if (connections_ >= options_.max_connections) {
      options_.log("event=metrics_refused connections=" + std::to_string(connections_));
      return;
    }
    ++connections_;
    serving_.add(http_.listenHttp(kj::mv(stream)).attach(kj::defer([this] { --connections_; })));
  }

  kj::Promise<void> request(kj::HttpMethod method, kj::StringPtr url, const kj::HttpHeaders&, kj::AsyncInputStream&,
                            Response& response) override {
    const std::string_view target(url.cStr(), url.size());
    if (target.substr(0, target.find('?')) != "/metrics") {
      return answer(response, 404, "Not Found", "the metrics are at /metrics\n");
    }
    if (method != kj::HttpMethod::GET) return answer(response, 405, "Method Not Allowed", "only GET is answered\n");
    if (text_ == nullptr || timer_.now() - made_ >= options_.fresh_ms * kj::MILLISECONDS) {
      text_ = std::make_shared<const std::string>(options_.text());
      made_ = timer_.now();
    }
    return send(response, 200, "OK", "text/plain; version=0.0.4; charset=utf-8", text_);
  }

  kj::Promise<void> answer(Response& response, unsigned status, kj::StringPtr reason, const char* text) {
    return send(response, status, reason, "text/plain; charset=utf-8", std::make_shared<const std::string>(text));
  }

  kj::Promise<void> send(Response& response, unsigned status, kj::StringPtr reason, kj::StringPtr type,
                         std::shared_ptr<const std::string> text) {
    kj::HttpHeaders headers(table_);
    headers.set(kj::HttpHeaderId::CONTENT_TYPE, type);
    if (status == 405) headers.add("Allow", "GET");
    auto stream = response.send(status, reason, headers, text->size());
    auto written = stream->write(text->data(), text->size()).attach(kj::mv(stream), std::move(text));
    return written.exclusiveJoin(timer_.afterDelay(options_.deadline_ms * kj::MILLISECONDS).then([this] {
      options_.log("event=metrics_not_read action=disconnect waited_ms=" + std::to_string(options_.deadline_ms));
      kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "the metrics were not read in time"));
    }));
  }

  // A connection that breaks is over, however it broke.
  void taskFailed(kj::Exception&&) override {}

  const MetricsServerOptions options_;
  kj::Timer& timer_;
  kj::HttpHeaderTable table_;
  Errors errors_;
  kj::Own<kj::ConnectionReceiver> receiver_;
  kj::HttpServer http_;
  std::uint32_t connections_ = 0;
  std::shared_ptr<const std::string> text_;
  kj::TimePoint made_ = kj::origin<kj::TimePoint>();
  kj::TaskSet serving_;  // last: connections end while everything they use still stands
};

}  // namespace

std::unique_ptr<MetricsServer> serve_metrics(kj::AsyncIoContext& io, int listening_fd, MetricsServerOptions options) {
  return std::make_unique<Server>(io, listening_fd, std::move(options));
}

}  // namespace kvq
