//! The close that crosses a payment: it left before a byte of the payment came.

use std::time::Duration;

use tokio::time::sleep;

use crate::BoxError;
use crate::client::{Client, Order};
use crate::scenes::Target;
use crate::scenes::witness::Witness;
use crate::server::PaymentServer;

use super::paid::{Case, Paid};
use super::{AMOUNT, payments};

/// For people, above the table.
pub(super) const EXPLAINED: &str = "\
close_crosses: the server closes the idle connection while the payment is on its way. Its FIN\n\
acknowledges no byte of it, so nothing had come when it closed: strong evidence, but no proof.\n\
So the caller is told. close_crosses_opted_in: resend_not_received(true) sends it again.";

/// The server to play it on, or why there is none.
pub(super) fn server(target: &Target) -> Result<&PaymentServer, &'static str> {
    if !cfg!(target_os = "linux") {
        return Err("only Linux tells what the server had acknowledged");
    }
    let built_in = target.built_in.as_ref();
    let built_in =
        built_in.ok_or("it needs a server that closes at a known moment, so the built-in one")?;
    Ok(&built_in.server)
}

/// Orders without a key, on a connection that the server closes meanwhile.
pub(super) async fn pay(
    client: &Client,
    server: &PaymentServer,
    witness: &Witness<'_>,
    case: Case,
) -> Result<Paid, BoxError> {
    let before = payments(witness).await?;
    // Leaves an idle connection, the one that the payment will take.
    client.send(client.get("/hello")?).await?;
    let request = client.payment("/payments", &Order::unkeyed(AMOUNT))?;
    let crossing = server.cross().await?;
    let close = async move {
        sleep(UNDER_WAY).await;
        crossing.close().await;
    };
    // Polled in this order, so the payment leaves first.
    let (outcome, ()) = tokio::join!(biased; client.send(request), close);
    let after = payments(witness).await?;
    Ok(Paid {
        case,
        before,
        after,
        outcome,
        again: None,
        in_the_end: after,
    })
}

/// Enough to write a request to a socket, and far from the 200 ms after which the kernel sends it again:
/// by then the server must have closed, however busy the machine.
const UNDER_WAY: Duration = Duration::from_millis(20);
