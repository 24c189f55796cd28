//! The policy: how much retrying is wanted, within what the decision table says is safe.
//!
//! Decides; never sends, waits or counts. Pure: no I/O, no clock. What happened comes in as
//! [`Evidence`], what was done already as [`History`]; the random source for the jitter is an argument.
//!
//! # Invariants
//!
//! * A request of class [`Class::Unkeyed`] is sent again only on proof that it had no effect, or on what
//!   the caller has opted in to.
//! * A wait is never shorter than the server asked for.
//! * Attempts <= `max_attempts` + `max_unsent`, whatever the evidence.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::HeaderName;
use http::{HeaderMap, Request, StatusCode};

use crate::error::Error;
use crate::origin::Origin;
use crate::retry::backoff::Backoff;
use crate::retry::budget::RetryBudget;
use crate::retry::idempotency::{self, Class, KeyForm};
use crate::retry::table::{Evidence, OptIn, Verdict, classify_response, verdict};
use crate::stats::{Refusal, RetryReason};

/// When a failed request is sent again, how often, and after what wait.
///
/// Cheap to clone; clones share the budget. What is *safe* is fixed (see [`Class`] and
/// [`Delivery`](crate::Delivery)); the policy only says how much of it is wanted.
///
/// ```
/// use std::time::Duration;
/// use idempool::RetryPolicy;
///
/// let policy = RetryPolicy::default()
///     .max_attempts(4)
///     .backoff(Duration::from_millis(50), Duration::from_secs(2))
///     .deadline(Duration::from_secs(20));
/// # drop(policy);
/// ```
#[derive(Clone)]
pub struct RetryPolicy {
    max_attempts: u32,
    max_unsent: u32,
    backoff: Backoff,
    deadline: Option<Duration>,
    max_retry_after: Duration,
    budget: Option<RetryBudget>,
    retry_500: bool,
    resend_not_received: bool,
    resend_incomplete: bool,
    trusted_rejections: Option<Arc<HashSet<Origin>>>,
    keyed_beyond_one: bool,
    pushback: Option<HeaderName>,
    is_proxy: bool,
    key_field: HeaderName,
    key_form: KeyForm,
    keyed_origins: Option<Arc<HashSet<Origin>>>,
    rng: Arc<Mutex<fastrand::Rng>>,
}

impl RetryPolicy {
    /// The policy that never sends anything again: one attempt, whatever happens.
    ///
    /// Keys are still checked, so that a layer with this policy refuses what another would refuse.
    pub fn none() -> Self {
        RetryPolicy::default().max_attempts(1).max_unsent(0)
    }

    /// Sets how often a request may be sent in all, the first attempt included.
    ///
    /// Attempts that are proven to have had no effect are counted by
    /// [`max_unsent`](Self::max_unsent) instead.
    ///
    /// # Default
    /// 3, as in the AWS SDKs and in Google's SRE book: whoever fails three times is not failing by
    /// chance.
    ///
    /// # Panics
    /// Panics if `attempts` is zero.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        assert!(attempts > 0, "max_attempts counts the first attempt");
        self.max_attempts = attempts;
        self
    }

    /// Sets how often a request may be sent again on proof that the attempt before had no effect: no
    /// byte was sent, or the server answered 421 or 425 (those once).
    ///
    /// They are safe for every method and take nothing from the budget. Zero switches them off.
    ///
    /// # Default
    /// 3: enough to get past a server that is just restarting, and an end for one that is gone.
    pub fn max_unsent(mut self, resends: u32) -> Self {
        self.max_unsent = resends;
        self
    }

    /// Sets the wait between attempts: drawn evenly from zero to `base`, then to twice that, and so on
    /// up to `cap`.
    ///
    /// # Default
    /// From 100 ms, about a round trip and a server's pause for breath, to 10 s, the longest that a
    /// caller with three attempts is likely to sit through.
    pub fn backoff(mut self, base: Duration, cap: Duration) -> Self {
        self.backoff = Backoff { base, cap };
        self
    }

    /// Makes the waits repeat from run to run, for tests. All clones draw from one sequence.
    pub fn jitter_seed(self, seed: u64) -> Self {
        let rng = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
        RetryPolicy { rng, ..self }
    }

    /// Sets a limit on the whole: all attempts and waits, up to the response head.
    ///
    /// No attempt starts after it, and no wait that would outlast it begins: the outcome at hand is
    /// returned at once. An attempt that runs when it passes is dropped and gives an
    /// [`ErrorKind::Deadline`](crate::ErrorKind::Deadline), whose delivery is `Unknown` as soon as any attempt's was. Reading the
    /// response body is not limited.
    ///
    /// # Default
    /// `None`, no limit of ours: how long an operation may take is known to its caller only, and a
    /// default would break slow ones that work. The number of attempts is bounded anyway.
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// Sets the longest `Retry-After` that is waited for. On a longer one the response itself is
    /// returned: to come back earlier than asked is never right
    /// ([RFC 9110 section 10.2.3]).
    ///
    /// # Default
    /// 60 s: the usual window of a rate limit. More is a matter for a job queue, not for a caller
    /// that waits.
    ///
    /// [RFC 9110 section 10.2.3]: https://www.rfc-editor.org/rfc/rfc9110.html#section-10.2.3
    pub fn max_retry_after(mut self, longest: Duration) -> Self {
        self.max_retry_after = longest;
        self
    }

    /// Sets the budget. `None` means no budget: every request may use all its attempts, also while the
    /// server is overloaded.
    ///
    /// # Default
    /// [`RetryBudget::default`], new for each policy and shared by its clones.
    pub fn budget(mut self, budget: impl Into<Option<RetryBudget>>) -> Self {
        self.budget = budget.into();
        self
    }

    /// Sets whether safe and idempotent requests are sent again after a 500.
    ///
    /// A keyed request always is, unless the response says by `Idempotent-Replayed: true` that it is
    /// the stored answer, which no repetition will change.
    ///
    /// # Default
    /// `false`: a 500 is mostly a bug, and asking again meets it again.
    pub fn retry_500(mut self, retry: bool) -> Self {
        self.retry_500 = retry;
        self
    }

    /// Sets whether a request that nothing else makes safe to send again is sent again on
    /// [`Delivery::NotReceived`](crate::Delivery::NotReceived): the kernel's evidence that the server had
    /// closed the connection before it received a byte of it.
    ///
    /// This recovers the commonest failure of pooled connections, a close that crosses a request, for
    /// every method. It is strong evidence and not proof. It is wrong for a server that closes its sending
    /// side only, still reads and acts on a request that it can no longer answer, and then aborts before
    /// its kernel has acknowledged it (some 40 ms on Linux); such a server breaks
    /// [RFC 9112 section 9.6]. And it speaks of the next TCP peer, which may be a proxy.
    ///
    /// # Default
    /// `false`: the verdict is on the error either way, for the caller to decide.
    ///
    /// [RFC 9112 section 9.6]: https://www.rfc-editor.org/rfc/rfc9112.html#section-9.6
    pub fn resend_not_received(mut self, resend: bool) -> Self {
        self.resend_not_received = resend;
        self
    }

    /// Sets whether such a request is sent again when the connection broke before the kernel had taken
    /// all of it, so that the server cannot have read it to its end.
    ///
    /// A server must treat a message that is shorter than its framing says as incomplete
    /// ([RFC 9112 section 8]). One that acts on a body while it arrives, chunk by chunk, has acted on the
    /// part it got.
    ///
    /// # Default
    /// `false`: only the caller knows that the server acts on whole requests.
    ///
    /// [RFC 9112 section 8]: https://www.rfc-editor.org/rfc/rfc9112.html#section-8
    pub fn resend_incomplete(mut self, resend: bool) -> Self {
        self.resend_incomplete = resend;
        self
    }

    /// Sets the origins whose 408, 429 and 503 mean that they did not act on the request. There such a
    /// request is sent again after a wait, as others are.
    ///
    /// No RFC says that these statuses mean so. 408 in particular is also what middleware answers when a
    /// handler is slow, after the whole request was read and perhaps acted on.
    ///
    /// # Default
    /// None.
    pub fn trusted_rejections(mut self, origins: impl IntoIterator<Item = Origin>) -> Self {
        self.trusted_rejections = Some(Arc::new(origins.into_iter().collect()));
        self
    }

    /// Sets whether a keyed request may be sent again after a second failure that leaves open whether
    /// the first had an effect.
    ///
    /// [RFC 9110 section 9.2.2] says that a client should not retry a failed automatic retry. Safe
    /// and idempotent requests are held to that. A key makes one more attempt harmless, and giving up
    /// leaves the caller with an operation of unknown outcome.
    ///
    /// # Default
    /// `true`, up to [`max_attempts`](Self::max_attempts): a deliberate deviation from that "should".
    ///
    /// [RFC 9110 section 9.2.2]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.2
    pub fn second_ambiguous_retry_for_keyed(mut self, retry: bool) -> Self {
        self.keyed_beyond_one = retry;
        self
    }

    /// Sets a response field in which the server says whether a failed request should be sent again:
    /// `Stripe-Should-Retry`, for one. `false` makes the response final, `true` makes any response but a
    /// success worth another attempt after a wait. It overrides the status, never what is safe: an unkeyed
    /// request is not sent again for it.
    ///
    /// # Default
    /// None: no such field is standard.
    pub fn pushback_header(mut self, field: impl Into<Option<HeaderName>>) -> Self {
        self.pushback = field.into();
        self
    }

    /// Sets whether the layer is part of a proxy. A proxy must not retry requests with non-idempotent
    /// methods on its own, and knows less of them than their sender does
    /// ([RFC 9110 section 9.2.2]): keys, [`TreatAsIdempotent`](crate::TreatAsIdempotent) and what was opted
    /// in to count for nothing then. Proof that a request had no effect still does.
    ///
    /// # Default
    /// `false`: a client.
    ///
    /// [RFC 9110 section 9.2.2]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.2
    pub fn proxy(mut self, is_proxy: bool) -> Self {
        self.is_proxy = is_proxy;
        self
    }

    /// Sets the field in which keys that were written by hand are looked for.
    ///
    /// # Default
    /// `Idempotency-Key`. A key that was attached is found wherever it was attached to.
    pub fn key_header(mut self, field: HeaderName) -> Self {
        self.key_field = field;
        self
    }

    /// Sets how keys that were written by hand are read. One that cannot be read is an error, and the
    /// request is not sent.
    ///
    /// # Default
    /// [`KeyForm::StructuredField`], the form of the draft.
    pub fn key_form(mut self, form: KeyForm) -> Self {
        self.key_form = form;
        self
    }

    /// Narrows where a key counts: only these origins are trusted to honour it. Elsewhere it is sent
    /// but not looked at, and the request is [`Class::Unkeyed`].
    ///
    /// # Default
    /// Everywhere: putting a key on a request is the caller's word that the server honours it. Narrow
    /// it where keys are put on by something that does not know the server.
    pub fn keyed_origins(mut self, origins: impl IntoIterator<Item = Origin>) -> Self {
        self.keyed_origins = Some(Arc::new(origins.into_iter().collect()));
        self
    }

    /// The class that this policy sees in a request.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) if the request has a key that cannot be read with
    /// certainty: malformed, twice, or changed since it was attached. The layer then sends nothing.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use idempool::{Class, IdempotencyKey, RetryPolicy};
    ///
    /// let request = http::Request::post("https://pay.example/payments").body(())?;
    /// let policy = RetryPolicy::default();
    /// assert_eq!(policy.class_of(&request)?, Class::Unkeyed);
    /// let request = IdempotencyKey::random().attach(request)?;
    /// assert_eq!(policy.class_of(&request)?, Class::Keyed);
    /// # Ok(())
    /// # }
    /// ```
    pub fn class_of<B>(&self, request: &Request<B>) -> Result<Class, Error> {
        if self.is_proxy && !request.method().is_idempotent() {
            return Ok(Class::Unkeyed);
        }
        let keyed = self.counts_keys(request)
            && idempotency::has_key(
                request.headers(),
                request.extensions(),
                &self.key_field,
                self.key_form,
            )?;
        Ok(Class::of(request.method(), request.extensions(), keyed))
    }

    fn counts_keys<B>(&self, request: &Request<B>) -> bool {
        self.keyed_origins.as_ref().is_none_or(|origins| {
            Origin::of(request.uri()).is_some_and(|origin| origins.contains(&origin))
        })
    }

    /// Reads the evidence in a response.
    pub(crate) fn evidence_of(&self, status: StatusCode, headers: &HeaderMap) -> Evidence {
        let evidence = classify_response(status, headers);
        let is_open = !matches!(
            evidence,
            Evidence::Misdirected | Evidence::TooEarly | Evidence::Replayed
        );
        let word = self.pushback.as_ref().and_then(|field| headers.get(field));
        match word.map(|word| word.as_bytes().trim_ascii()) {
            Some(word) if word.eq_ignore_ascii_case(b"false") => Evidence::PushedBack,
            Some(word) if word.eq_ignore_ascii_case(b"true") && is_open && !status.is_success() => {
                Evidence::AskedBack
            }
            _ => evidence,
        }
    }

    /// Whether this origin's rejections are proof enough.
    pub(crate) fn trusts_rejections_of(&self, origin: Option<&Origin>) -> bool {
        let trusted = self.trusted_rejections.as_ref();
        trusted.is_some_and(|origins| origin.is_some_and(|origin| origins.contains(origin)))
    }

    pub(crate) fn limit(&self) -> Option<Duration> {
        self.deadline
    }

    pub(crate) fn shared_budget(&self) -> Option<&RetryBudget> {
        self.budget.as_ref()
    }

    /// Whether the number of attempts allows one more if the next one fails with its effect open.
    pub(crate) fn allows_another(&self, history: &History) -> bool {
        history.counted + 1 < self.max_attempts
    }

    /// Decides with this policy's own random source.
    pub(crate) fn decide(&self, situation: &Situation, history: &History) -> Decision {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        self.decide_with(situation, history, &mut rng)
    }

    /// The decision but for the budget, which the caller asks last.
    fn decide_with(
        &self,
        situation: &Situation,
        history: &History,
        rng: &mut fastrand::Rng,
    ) -> Decision {
        let &Situation {
            evidence,
            class,
            rejections_trusted: trusted,
            ..
        } = situation;
        let Some(reason) = evidence.reason() else {
            let committed = evidence == Evidence::Committed;
            return Decision::Stop(committed.then_some(Refusal::Committed));
        };
        let wait_at_least = match self.wanted(evidence, class, trusted) {
            Verdict::No => {
                // Blame the method only if another method would have been sent again.
                let blamed = self.wanted(evidence, Class::Idempotent, trusted) != Verdict::No;
                return Decision::Stop(blamed.then_some(Refusal::MethodNotIdempotent));
            }
            _ if situation.already_retried => {
                return Decision::Stop(Some(Refusal::AlreadyRetried));
            }
            verdict => match self.first_wait(verdict, evidence, class, history, rng) {
                Some(wait) => wait,
                None => return Decision::Stop(Some(Refusal::Attempts)),
            },
        };
        if !situation.body_ready {
            return Decision::Stop(Some(Refusal::BodyNotReplayable));
        }
        let asked = situation.retry_after.unwrap_or_default();
        if asked > self.max_retry_after {
            return Decision::Stop(Some(Refusal::RetryAfterTooLong));
        }
        let wait = asked.saturating_add(wait_at_least);
        if situation.time_left.is_some_and(|left| wait >= left) {
            return Decision::Stop(Some(Refusal::Deadline));
        }
        Decision::Resend { wait, reason }
    }

    /// The table's verdict, what the policy opted in to included.
    fn wanted(&self, evidence: Evidence, class: Class, rejections_trusted: bool) -> Verdict {
        match verdict(evidence, class) {
            Verdict::NowIf(what) if self.has_opted_in(what, rejections_trusted) => Verdict::Now,
            Verdict::WaitIf(what) if self.has_opted_in(what, rejections_trusted) => Verdict::Wait,
            Verdict::NowIf(_) | Verdict::WaitIf(_) => Verdict::No,
            verdict => verdict,
        }
    }

    fn has_opted_in(&self, what: OptIn, rejections_trusted: bool) -> bool {
        if self.is_proxy && what != OptIn::ServerError {
            return false;
        }
        match what {
            OptIn::NotReceived => self.resend_not_received,
            OptIn::Incomplete => self.resend_incomplete,
            OptIn::Rejections => rejections_trusted,
            OptIn::ServerError => self.retry_500,
        }
    }

    /// Our own part of the wait; `None` if a cap forbids one more attempt.
    fn first_wait(
        &self,
        verdict: Verdict,
        evidence: Evidence,
        class: Class,
        history: &History,
        rng: &mut fastrand::Rng,
    ) -> Option<Duration> {
        let within = if evidence.is_proof_of_no_effect() {
            history.unsent < self.max_unsent
        } else {
            self.allows_another(history)
        };
        let repeated = history.of(evidence) > 0;
        let held_to_one =
            evidence.is_ambiguous() && class == Class::Keyed && !self.keyed_beyond_one;
        let only_once = matches!(verdict, Verdict::NowOnce | Verdict::WaitOnce) || held_to_one;
        if !within || (only_once && repeated) {
            return None;
        }
        Some(match verdict {
            Verdict::Now | Verdict::NowOnce => Duration::ZERO,
            Verdict::NowThenWait if !repeated => Duration::ZERO,
            _ => self.backoff.wait(history.waits, rng),
        })
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            max_attempts: 3,
            max_unsent: 3,
            backoff: Backoff {
                base: Duration::from_millis(100),
                cap: Duration::from_secs(10),
            },
            deadline: None,
            max_retry_after: Duration::from_secs(60),
            budget: Some(RetryBudget::default()),
            retry_500: false,
            resend_not_received: false,
            resend_incomplete: false,
            trusted_rejections: None,
            keyed_beyond_one: true,
            pushback: None,
            is_proxy: false,
            key_field: idempotency::KEY_FIELD,
            key_form: KeyForm::default(),
            keyed_origins: None,
            rng: Arc::new(Mutex::new(fastrand::Rng::new())),
        }
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("max_attempts", &self.max_attempts)
            .field("max_unsent", &self.max_unsent)
            .field("backoff", &self.backoff)
            .field("deadline", &self.deadline)
            .field("max_retry_after", &self.max_retry_after)
            .field("budget", &self.budget)
            .field("retry_500", &self.retry_500)
            .field("resend_not_received", &self.resend_not_received)
            .field("resend_incomplete", &self.resend_incomplete)
            .field("trusted_rejections", &self.trusted_rejections)
            .field("second_ambiguous_retry_for_keyed", &self.keyed_beyond_one)
            .field("pushback_header", &self.pushback)
            .field("proxy", &self.is_proxy)
            .field("key_header", &self.key_field)
            .field("key_form", &self.key_form)
            .field("keyed_origins", &self.keyed_origins)
            .finish_non_exhaustive()
    }
}

/// All that one decision rests on, but for what was done before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    pub(crate) evidence: Evidence,
    pub(crate) class: Class,
    /// Whether the next attempt could have the whole body.
    pub(crate) body_ready: bool,
    /// Whether a retry layer further down has had its say.
    pub(crate) already_retried: bool,
    /// Whether the origin is trusted to turn requests away before it acts on them.
    pub(crate) rejections_trusted: bool,
    pub(crate) retry_after: Option<Duration>,
    /// Until the deadline.
    pub(crate) time_left: Option<Duration>,
}

/// The resends of one logical request so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct History {
    /// All of them.
    pub(crate) resends: u32,
    /// After proof of no effect; `refused` of them after the server's word.
    unsent: u32,
    refused: u32,
    /// After anything else: these count as attempts.
    counted: u32,
    ambiguous: u32,
    timeouts: u32,
    /// After a wait of ours: what the backoff grows with.
    waits: u32,
}

impl History {
    /// Notes a resend.
    pub(crate) fn add(&mut self, evidence: Evidence, wait: Duration) {
        self.resends += 1;
        self.unsent += u32::from(evidence.is_proof_of_no_effect());
        self.refused += u32::from(evidence.is_refusal());
        self.counted += u32::from(!evidence.is_proof_of_no_effect());
        self.ambiguous += u32::from(evidence.is_ambiguous());
        self.timeouts += u32::from(evidence == Evidence::RequestTimeout);
        self.waits += u32::from(!wait.is_zero());
    }

    /// How many of the same sort there were: what "once" is measured by.
    fn of(&self, evidence: Evidence) -> u32 {
        if evidence.is_refusal() {
            self.refused
        } else if evidence.is_ambiguous() {
            self.ambiguous
        } else if evidence == Evidence::RequestTimeout {
            self.timeouts
        } else {
            0
        }
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Decision {
    /// Send it again after `wait`.
    Resend { wait: Duration, reason: RetryReason },
    /// Return the outcome; with a refusal where it was a failure that could have been retried.
    Stop(Option<Refusal>),
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
