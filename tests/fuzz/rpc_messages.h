// Messages of Cap'n Proto's protocol as a hostile peer makes them: well-formed ones with fields that the fuzzer picks,
// and the same with bytes changed or cut off.
//
// Invariant: a number of 0 everywhere gives a message that a good client would send at that point, so that short inputs
// get far.
#pragma once

#include <capnp/capability.h>

#include <functional>
#include <vector>

#include "tests/fuzz/input.h"
#include "tests/rpc/raw_peer.h"

namespace kvq::testing {

enum class MessageKind : std::uint8_t {
  register_model,
  session_call,
  admin,
  admin_call,
  finish,
  release,
  answer,
  bootstrap,
  any_call,
  other_kind,
  huge,
  spoil_next
};
constexpr unsigned kMessageKinds = 12;

// What one connection has said so far: a good client's next words build on it. Question 0 is the bootstrap.
struct Dialog {
  std::uint32_t last_question = 0, session_question = 0, admin_question = 0;
};

class HostileMessages {
 public:
  explicit HostileMessages(FuzzInput& in) : in_(in) {}
  std::function<SessionToken(std::uint32_t session)> token;

  // The bytes of one message; none: the next one will be spoilt.
  std::vector<kj::byte> make(MessageKind kind, Dialog& dialog) {
    dialog_ = &dialog;
    if (kind == MessageKind::spoil_next) {
      spoilt_ = true;
      return {};
    }
    if (kind == MessageKind::huge) return frame();
    capnp::MallocMessageBuilder builder;
    auto message = builder.initRoot<capnp::rpc::Message>();
    fill(kind, message);
    const auto words = capnp::messageToFlatArray(builder);
    std::vector<kj::byte> bytes(words.asBytes().begin(), words.asBytes().end());
    if (std::exchange(spoilt_, false)) spoil(bytes);
    return bytes;
  }

 private:
  using Message = capnp::rpc::Message::Builder;

  std::uint32_t number() { return in_.below(8) == 7 ? in_.take<std::uint32_t>() : in_.below(8); }
  std::uint32_t new_question() { return in_.below(16) == 15 ? number() : ++dialog_->last_question; }
  std::uint32_t old_question() { return in_.below(4) == 3 ? number() : dialog_->last_question; }
  std::uint32_t any_ms() { return in_.below(4) == 3 ? in_.take<std::uint32_t>() : in_.below(4); }

  void spoil(std::vector<kj::byte>& bytes) {
    for (std::uint32_t n = in_.below(4); n > 0; --n) {
      bytes[in_.take<std::uint16_t>() % bytes.size()] ^= in_.take<std::uint8_t>();
    }
    if (in_.below(4) == 3) bytes.resize(in_.take<std::uint16_t>() % (bytes.size() + 1));
  }

  // A header alone, which promises any number of segments of any size.
  std::vector<kj::byte> frame() {
    std::uint32_t words[4] = {number(), 0, 0, 0};
    words[1] = in_.below(2) == 0 ? 129 * 1024 : in_.take<std::uint32_t>();
    in_.copy(words + 2, in_.below(9));
    const auto* bytes = reinterpret_cast<const kj::byte*>(words);
    return {bytes, bytes + (in_.below(2) == 0 ? 8 : 16)};
  }

  void fill(MessageKind kind, Message& message) {
    switch (kind) {
      case MessageKind::register_model:
        return register_model(message);
      case MessageKind::session_call:
        return session_call(message);
      case MessageKind::admin:
        call(message, 1).initPromisedAnswer().setQuestionId(0);
        dialog_->admin_question = message.getCall().getQuestionId();
        return;
      case MessageKind::admin_call:
        return admin_call(message);
      case MessageKind::finish: {
        auto finish = message.initFinish();
        finish.setQuestionId(old_question());
        finish.setReleaseResultCaps(in_.below(2) == 0);
        return;
      }
      case MessageKind::release: {
        auto release = message.initRelease();
        release.setId(number());
        release.setReferenceCount(1 + number());
        return;
      }
      case MessageKind::answer:
        return answer(message);
      case MessageKind::any_call:
        return any_call(message);
      case MessageKind::other_kind:
        return other_kind(message);
      default:
        message.initBootstrap().setQuestionId(new_question());
    }
  }

  capnp::rpc::MessageTarget::Builder call(Message& message, std::uint16_t method,
                                          std::uint64_t interface = capnp::typeId<wire::Node>()) {
    auto call = message.initCall();
    call.setQuestionId(new_question());
    call.setInterfaceId(interface);
    call.setMethodId(method);
    return call.initTarget();
  }

  // The pointer `field` of an answer, or an export.
  void target(capnp::rpc::MessageTarget::Builder target, std::uint32_t question, std::uint16_t field) {
    if (in_.below(4) == 3) {
      target.setImportedCap(number());
      return;
    }
    auto answer = target.initPromisedAnswer();
    answer.setQuestionId(in_.below(16) == 15 ? number() : question);
    auto operations = answer.initTransform(1);
    operations[0].setGetPointerField(in_.below(8) == 7 ? number() : field);
  }

  void capability(capnp::rpc::CapDescriptor::Builder c) {
    switch (in_.below(8)) {
      case 4:
        return c.setNone();
      case 5:
        return c.setReceiverHosted(number());
      case 6:
        return c.setSenderPromise(number());
      case 7:
        c.initThirdPartyHosted().setVineId(number());
        return;
      default:
        c.setSenderHosted(in_.below(4));
    }
  }
  void capabilities(capnp::rpc::Payload::Builder payload) {
    auto table = payload.initCapTable(in_.below(16) == 15 ? in_.below(7) : 1);
    for (auto c : table) capability(c);
  }
  template <typename Params>
  typename Params::Builder params(Message& message) {
    return message.getCall().initParams().getContent().initAs<Params>();
  }

  void register_model(Message& message) {
    call(message, 0).initPromisedAnswer().setQuestionId(0);
    dialog_->session_question = message.getCall().getQuestionId();
    capabilities(message.getCall().initParams());
    capnp::BuilderCapabilityTable table;  // only so that a pointer to a capability can be written
    auto content = table.imbue(message.getCall().getParams().getContent());
    auto r = content.initAs<wire::Node::RegisterParams>().initRequest();
    const std::uint32_t odd = in_.below(16);  // one field at a time is wrong, or none
    r.setContractVersion(odd == 9 ? number() : kContractVersion);
    r.setPageTokens(odd == 10 ? number() : kPageTokens);
    r.setRole(static_cast<wire::Role>(in_.below(4)));
    auto layers = r.initLayers(odd == 11 ? in_.below(200) : 1);
    for (auto layer : layers) {
      layer.setKvHeads(odd == 12 ? in_.take<std::uint16_t>() : 1);
      layer.setHeadDim(odd == 13 ? in_.take<std::uint16_t>() : 64);
      layer.setDtype(in_.below(4) == 3 ? in_.take<std::uint8_t>() : 0);
      layer.setKeepDense(in_.below(2) == 1);
    }
    r.initFingerprint(odd == 14 ? in_.below(256) : 32);
    r.setCredits(number());
    r.setFormatFloorDense(in_.below(2) == 1);
    if (odd != 15) r.setSlabs(wire::SlabSink::Client(KJ_EXCEPTION(FAILED, "never called here")));
    r.setLabel(odd == 8 ? "a \"label\"\n\x01 that is not printable" : "peer");
    if (in_.below(4) != 3) return;
    const std::uint32_t session = number();
    r.setResumeSession(session);
    SessionToken bytes = token(session);
    if (in_.below(4) == 3) in_.copy(bytes.data(), 4);
    r.setResumeToken(kj::arrayPtr(bytes.data(), in_.below(8) == 7 ? 15 : 16));
  }

  void session_call(Message& message) {
    const std::uint16_t method = in_.below(12);
    target(call(message, method, capnp::typeId<wire::Session>()), dialog_->session_question, 1);
    switch (method) {
      case 6: {
        auto p = params<wire::Session::CreditsParams>(message);
        p.setPages(number());
        p.setDeadlineMs(any_ms());
        return;
      }
      case 7: {
        auto p = params<wire::Session::AttachParams>(message);
        p.setSequence(number());
        p.setLastPage(number());
        p.setGeneration(in_.below(3));
        p.setPages(number());
        p.initKey(in_.below(8) == 7 ? in_.below(64) : 32);
        p.setFormatFloorDense(in_.below(2) == 1);
        return;
      }
      case 8: {
        auto p = params<wire::Session::ResumeParams>(message);
        p.setSequence(number());
        p.setDeadlineMs(any_ms());
        return;
      }
      case 9:
        params<wire::Session::LostPagesParams>(message).setSince(number());
        return;
      default:
        message.getCall().initParams();
    }
  }

  const char* tenant() {
    static const std::string mine = "uid-" + std::to_string(::getuid());
    const char* names[] = {"", mine.c_str(), "nobody", "uid-\n\"x"};
    return names[in_.below(4)];
  }

  void set(Message& message) {
    static const std::string quota = "quota.uid-" + std::to_string(::getuid());
    static const std::string share = "share.uid-" + std::to_string(::getuid());
    const char* keys[] = {"quantize_at", "evict_at",    "refuse_at", "relief",
                          quota.c_str(), share.c_str(), "quota.x",   ""};
    const char* values[] = {"0.5", "0.9", "1", "0", "-1", "nan", "1e400", "128KiB", "0x", "99999999999999999999TiB"};
    auto p = params<wire::Admin::SetParams>(message);
    p.setKey(keys[in_.below(8)]);
    p.setSaved(in_.below(4) == 3);
    if (in_.below(2) == 0) {
      p.setValue(values[in_.below(10)]);
    } else {
      in_.copy(p.initValue(6).begin(), 6);
    }
  }

  void admin_call(Message& message) {
    const std::uint16_t method = in_.below(16);  // one more than there are
    target(call(message, method, capnp::typeId<wire::Admin>()), dialog_->admin_question, 1);
    message.getCall().initParams();
    switch (method) {
      case 3: {
        auto p = params<wire::Admin::PagesParams>(message);
        p.setTenant(tenant());
        p.setLimit(number());
        return;
      }
      case 4: {
        auto p = params<wire::Admin::QuantizeParams>(message);
        p.setTenant(tenant());
        p.setIdleMs(number());
        p.setDryRun(in_.below(2) == 1);
        return;
      }
      case 5:
        return set(message);
      case 6:
        params<wire::Admin::DrainParams>(message).setDeadlineMs(any_ms());
        return;
      case 7: {
        auto p = params<wire::Admin::EvictSessionParams>(message);
        p.setSession(1 + number());
        p.setKill(in_.below(2) == 1);
        return;
      }
      case 8: {
        auto p = params<wire::Admin::VerifyParams>(message);
        p.setTenant(tenant());
        p.setDeadlineMs(any_ms());
        return;
      }
      case 9: {
        auto p = params<wire::Admin::EventsParams>(message);
        p.setAfter(number());
        p.setLimit(number());
        return;
      }
      default:
        return list_or_room_call(message, method);
    }
  }

  void list_or_room_call(Message& message, std::uint16_t method) {
    switch (method) {
      case 10: {
        auto p = params<wire::Admin::SequencesParams>(message);
        p.setTenant(tenant());
        p.setSession(number());
        p.setLimit(number());
        return;
      }
      case 11: {
        auto p = params<wire::Admin::PrefixParams>(message);
        p.setTenant(tenant());
        p.setLimit(number());
        return;
      }
      case 12: {
        auto p = params<wire::Admin::EvictParams>(message);
        p.setTenant(tenant());
        p.setIdleMs(number());
        p.setDryRun(in_.below(2) == 1);
        return;
      }
      case 13: {
        auto p = params<wire::Admin::CompactParams>(message);
        p.setTenant(tenant());
        p.setDryRun(in_.below(2) == 1);
        return;
      }
      case 14: {
        auto p = params<wire::Admin::ResizeParams>(message);
        p.setArenaBytes(std::uint64_t{number()} * (in_.below(4) == 3 ? 1 : 65536));
        p.setDevice(in_.below(4) == 3 ? "GPU-x" : "");
        p.setDryRun(in_.below(2) == 1);
        return;
      }
      default:
        return;
    }
  }

  // What a SlabSink says, or not.
  void answer(Message& message) {
    auto answer = message.initReturn();
    answer.setAnswerId(number());
    answer.setReleaseParamCaps(in_.below(2) == 0);
    switch (in_.below(8)) {
      case 4:
        answer.initException().setReason("no");
        return;
      case 5:
        answer.setCanceled();
        return;
      case 6:
        answer.setTakeFromOtherQuestion(number());
        return;
      case 7:
        capabilities(answer.initResults());
        return;
      default:
        answer.initResults().getContent().initAs<wire::SlabSink::MapResults>();
    }
  }

  void any_call(Message& message) {
    target(call(message, in_.take<std::uint16_t>(), in_.below(2) == 0 ? capnp::typeId<wire::SlabSink>() : number()),
           old_question(), in_.below(4));
    capabilities(message.getCall().initParams());
    if (in_.below(4) == 3) message.getCall().getSendResultsTo().setYourself();
  }

  void other_kind(Message& message) {
    switch (in_.below(8)) {
      case 0:
        message.initAbort().setReason("enough");
        return;
      case 1:
        message.initUnimplemented().initFinish().setQuestionId(number());
        return;
      case 2:
        capability(message.initResolve().initCap());
        return;
      case 3:
        message.initDisembargo().getContext().setSenderLoopback(number());
        return;
      case 4:
        message.initProvide().setQuestionId(number());
        return;
      case 5:
        message.initAccept().setQuestionId(number());
        return;
      case 6:
        message.initJoin().setQuestionId(number());
        return;
      default:  // an answer to a call that the peer says the daemon made
        message.initUnimplemented().initCall().setQuestionId(number());
    }
  }

  FuzzInput& in_;
  Dialog* dialog_ = nullptr;
  bool spoilt_ = false;
};

}  // namespace kvq::testing
