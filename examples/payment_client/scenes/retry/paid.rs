//! One row of the scene: what became of one order, by the client's word and by the server's count.

use http::StatusCode;
use idempool::{Delivery, Error};
use serde_json::Value;

use crate::client::{Answer, what_now};
use crate::report::{Column, Report, Row, or_dash};

/// How an order to pay goes wrong.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Case {
    ClosedBefore,
    AnswerLost,
    AnswerLostKeyed,
    CloseCrosses,
    CloseCrossesOptedIn,
}

impl Case {
    fn as_str(self) -> &'static str {
        match self {
            Self::ClosedBefore => "closed_before",
            Self::AnswerLost => "answer_lost",
            Self::AnswerLostKeyed => "answer_lost_keyed",
            Self::CloseCrosses => "close_crosses",
            Self::CloseCrossesOptedIn => "close_crosses_opted_in",
        }
    }

    /// Whether the server closes before a byte of the first attempt comes.
    pub(super) fn is_crossed(self) -> bool {
        matches!(self, Self::CloseCrosses | Self::CloseCrossesOptedIn)
    }

    /// Payments that the server makes of it.
    fn due(self) -> u64 {
        match self {
            Self::ClosedBefore | Self::CloseCrosses => 0,
            Self::AnswerLost | Self::AnswerLostKeyed | Self::CloseCrossesOptedIn => 1,
        }
    }
}

/// What became of one order to pay.
#[derive(Debug)]
pub(super) struct Paid {
    pub(super) case: Case,
    pub(super) before: u64,
    pub(super) after: u64,
    pub(super) outcome: Result<Answer, Error>,
    /// The answer to the same order with the same key, sent once more by hand.
    pub(super) again: Option<Answer>,
    /// Payments after that.
    pub(super) in_the_end: u64,
}

impl Paid {
    /// Payments made for this one order.
    pub(super) fn made(&self) -> u64 {
        self.in_the_end.saturating_sub(self.before)
    }

    pub(super) fn check(&self, report: &mut Report<'_>) {
        let name = self.case.as_str();
        let due = self.case.due();
        let made = self.made();
        report.expect(made >= due, || format!("{name}: the payment was lost"));
        report.expect(made <= due, || {
            let keyless = match self.case {
                Case::AnswerLostKeyed => "; this server does not honour idempotency keys",
                _ => "",
            };
            format!("{name}: {made} payments for one order, expected {due}{keyless}")
        });
        let is_told = match (&self.outcome, self.case) {
            (Ok(answer), Case::AnswerLostKeyed) => {
                let stored =
                    |answer: &Answer| answer.status == StatusCode::CREATED && answer.is_replayed;
                let again = self.again.as_ref();
                stored(answer)
                    && again.is_some_and(|again| stored(again) && again.body == answer.body)
            }
            (Ok(answer), Case::CloseCrossesOptedIn) => {
                answer.status == StatusCode::CREATED && self.attempts() == 2
            }
            (Err(error), Case::CloseCrosses) => {
                error.delivery() == Delivery::NotReceived && self.attempts() == 1
            }
            (Err(error), Case::ClosedBefore | Case::AnswerLost) => {
                error.delivery() == Delivery::Unknown && self.attempts() == 1
            }
            _ => false,
        };
        report.expect(is_told, || match &self.outcome {
            Ok(answer) => format!("{name}: answered {}", answer.status),
            Err(error) => format!("{name}: {error}"),
        });
    }

    fn attempts(&self) -> u32 {
        match &self.outcome {
            Ok(answer) => answer.attempts,
            Err(error) => 1 + error.resends(),
        }
    }

    fn delivery(&self) -> Option<Delivery> {
        self.outcome.as_ref().err().map(Error::delivery)
    }

    fn told(&self) -> String {
        match &self.outcome {
            Ok(answer) if answer.is_replayed => {
                format!(
                    "{}: paid; this is the stored answer",
                    answer.status.as_u16()
                )
            }
            Ok(answer) => answer.status.to_string(),
            Err(error) => what_now(error).to_owned(),
        }
    }
}

impl Row for Paid {
    const COLUMNS: &'static [Column] = &[
        Column::Left("case"),
        Column::Right("payments"),
        Column::Right("attempts"),
        Column::Left("delivery"),
        Column::Left("the caller is told"),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.case.as_str().to_owned(),
            format!("{} -> {}", self.before, self.after),
            self.attempts().to_string(),
            or_dash(self.delivery()),
            self.told(),
        ]
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let answer = self.outcome.as_ref().ok();
        vec![
            ("scene", "retry".into()),
            ("case", self.case.as_str().into()),
            ("payments_before", self.before.into()),
            ("payments_after", self.after.into()),
            ("attempts", self.attempts().into()),
            (
                "outcome",
                if answer.is_some() { "ok" } else { "error" }.into(),
            ),
            ("delivery", self.delivery().map(Delivery::as_str).into()),
            ("status", answer.map(|answer| answer.status.as_u16()).into()),
            ("replayed", answer.map(|answer| answer.is_replayed).into()),
        ]
    }
}
